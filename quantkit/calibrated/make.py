"""The words of a plan by a calibrated method: find them where an earlier run has made them, else make them."""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.calibrated import compressor
from quantkit.calibrated.compressor import OneShot
from quantkit.checkpoint.begun import run_directory
from quantkit.checkpoint.disk import named_errors, remove
from quantkit.checkpoint.source import source_stamps
from quantkit.convert.conversion import Conversion
from quantkit.convert.convert import convert_checkpoint
from quantkit.families import FAMILIES
from quantkit.gptq.factor import DAMPING, PRIOR_TOKENS
from quantkit.gptq.quantize import NUM_SWEEPS
from quantkit.gptq.stream import SAMPLE_TOKENS, StreamRequest, stream_words
from quantkit.machine import available_memory_bytes
from quantkit.plan.make import make_plan
from quantkit.plan.mtp import is_in, mtp_layers
from quantkit.plan.plan import Action, Plan
from quantkit.plan.smoothed import DOWN, UP
from quantkit.recipe import Recipe, default_recipe, parse_recipe, recipe_document
from quantkit.streaming import Tokens, open_model
from quantkit.weights.binding import bind_weights
from quantkit.weights.identity import model_fingerprint
from quantkit.weights.source_form import source_form
from quantkit.words import Words, WordsWriter, finish_words, has_words, open_words

WORDS_SUFFIX = ".words"
_MEMORY_SHARE = 0.7  # of what there is, for the model alone


@dataclass(frozen=True, slots=True, kw_only=True)
class WordsRequest:
    """``directory``: the words lie there, beside the output, until that is in place."""

    conversion: Conversion
    tokens: Tokens

    @property
    def plan(self) -> Plan:
        return self.conversion.plan

    @property
    def directory(self) -> Path:
        target = self.conversion.target
        return target.with_name(target.name + WORDS_SUFFIX)


@contextmanager
def made_words(request: WordsRequest) -> Iterator[Words]:
    """The words, whose directory is nobody else's until the block ends, and is removed where it ends well.

    Raises UsageError where the directory holds words of another run, SourceError for a model that is not run.
    """
    plan, directory = request.plan, request.directory
    document = _document(plan)
    # what is known of files has no place in an output, and the words' document goes there
    run = {**document, "source": source_stamps(plan.checkpoint), "modules": _digest_of(_shapes(plan))}
    with run_directory(directory, run, resume=request.conversion.resume):
        if not has_words(directory):
            _make(request, document)
        words = open_words(directory)
        words.check_modules(_shapes(plan), group_size=plan.recipe.group_size)
        yield words
        with named_errors(directory):
            remove(directory)


def _document(plan: Plan) -> dict[str, Any]:
    """What decides the words: the same document, the same run."""
    checkpoint, family, recipe = plan.checkpoint, FAMILIES[plan.family], plan.recipe
    binding = bind_weights(checkpoint.tensors, source_form(checkpoint.quantization), family.fused_experts)
    calibration = recipe.calibration
    assert calibration is not None
    return {
        "method": recipe.method,
        "by": "quantkit" if calibration.streaming else f"llm-compressor {version('llmcompressor')}",
        "transformers": version("transformers"),
        "quantkit": __version__,
        "model": model_fingerprint(binding, family, checkpoint.config),
        "tokens": calibration.model_dump(mode="json"),
        "parameters": _parameters(recipe),
        "group_size": recipe.group_size,
    }


def _digest_of(shapes: Mapping[str, tuple[int, int]]) -> str:
    return hashlib.sha256(json.dumps(sorted(shapes.items())).encode()).hexdigest()


def _parameters(recipe: Recipe) -> dict[str, Any]:
    if recipe.method == "awq":
        return {"between": [UP, DOWN], "scales": "search", "signed_scales": recipe.signed_scales, "all_experts": True}
    if recipe.calibration is None or not recipe.calibration.streaming:
        return {"damping": compressor.DAMPING, "order": "static", "scales": "absmax", "all_experts": True}
    return {
        "damping": DAMPING,
        "prior_tokens": PRIOR_TOKENS,
        "sample_tokens": SAMPLE_TOKENS,
        "sweeps": NUM_SWEEPS,
        "scales": "search",
        "signed_scales": recipe.signed_scales,
    }


def _shapes(plan: Plan) -> dict[str, tuple[int, int]]:
    jobs = (job for job in plan.jobs if job.action == Action.INT4)
    return {job.weight.module: (job.weight.num_rows, job.weight.num_cols) for job in jobs}


def _make(request: WordsRequest, document: Mapping[str, Any]) -> None:
    plan, shapes = request.plan, _shapes(request.plan)
    assert plan.recipe.calibration is not None
    drafts = mtp_layers(FAMILIES[plan.family], plan.checkpoint.config)  # which transformers does not run
    run = {name: shape for name, shape in shapes.items() if not is_in(drafts, name)}
    if plan.recipe.calibration.streaming:
        _stream(request, run)
        made: Mapping[str, tuple[int, int]] = run
    else:
        made = _compress(request, run)
    finish_words(request.directory, document, searched=shapes.keys() - made.keys())


def _stream(request: WordsRequest, shapes: Mapping[str, tuple[int, int]]) -> None:
    plan, device = request.plan, request.conversion.device.split(",")[0].replace("cuda:all", "cuda:0")
    model = open_model(plan.checkpoint, FAMILIES[plan.family], device=device)
    stream_words(
        StreamRequest(
            model=model,
            tokens=request.tokens,
            shapes=shapes,
            group_size=plan.recipe.group_size,
            signed=plan.recipe.signed_scales,
            directory=request.directory,
            report_progress=request.conversion.report_progress,
        )
    )


def _compress(request: WordsRequest, shapes: Mapping[str, tuple[int, int]]) -> Mapping[str, tuple[int, int]]:
    """By llm-compressor; the modules that it has changed."""
    recipe = request.plan.recipe
    is_gptq = recipe.method == "gptq"
    made = {name: shape for name, shape in shapes.items() if is_gptq or name.endswith((UP, DOWN))}
    with _plain_model(request) as model, redirect_stdout(sys.stderr):  # whose libraries print
        shot = OneShot(
            directory=model,
            modules=frozenset(shapes),
            group_size=recipe.group_size,
            signed=recipe.signed_scales,
            tokens=request.tokens,
            offload=_offload(model, request.directory),
        )
        writer = WordsWriter(request.directory / "words.safetensors", made, group_size=recipe.group_size)
        try:
            for module, words in (compressor.gptq_words if is_gptq else compressor.awq_words)(shot):
                writer.add(module, words)
            writer.close()
        finally:
            writer.abort()
    return made


def _offload(model: Path, directory: Path) -> Path | None:
    """A folder for what memory does not hold."""
    available = available_memory_bytes()
    needed = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return None if available is None or needed < _MEMORY_SHARE * available else directory / "offload"


@contextmanager
def _plain_model(request: WordsRequest) -> Iterator[Path]:
    """A directory that transformers loads: the source, or its weights decoded to BF16 for as long as it is needed."""
    conversion, checkpoint = request.conversion, request.plan.checkpoint
    if not checkpoint.quantization:
        yield checkpoint.directory
        return
    family = FAMILIES[request.plan.family]
    wanted: dict[str, Any] = {"rules": [], "mtp": "drop" if family.num_mtp_layers(checkpoint.config) else "int4"}
    document = recipe_document(default_recipe(family.name, has_experts=True)) | wanted
    plan = make_plan(parse_recipe(document, where="decoded source"), family, checkpoint, allow_incomplete=True)
    target = request.directory / "decoded"
    if target.exists():  # of a run that was stopped behind it
        remove(target)
    convert_checkpoint(
        Conversion(plan=plan, target=target, num_jobs=conversion.num_jobs, report_progress=conversion.report_progress)
    )
    try:
        yield target
    finally:
        with named_errors(target):
            remove(target)
