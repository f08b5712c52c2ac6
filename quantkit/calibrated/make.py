"""The words of a plan by a calibrated method: find them where an earlier run has made them, else make them."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.calibrated import compressor
from quantkit.calibrated.compressor import OneShot
from quantkit.calibrated.modules import chosen_shapes, decoded_plan, int4_shapes, run_shapes
from quantkit.calibrated.needs import calibration_needs, check_disk, model_memory_bytes, words_directory
from quantkit.calibrated.only_warnings import only_warnings
from quantkit.checkpoint.begun import remove_run, run_directory
from quantkit.checkpoint.disk import named_errors, remove
from quantkit.checkpoint.output import check_target, partial_of
from quantkit.checkpoint.source import source_stamps
from quantkit.convert.conversion import Conversion
from quantkit.convert.convert import convert_checkpoint
from quantkit.families import FAMILIES
from quantkit.gptq.factor import DAMPING, PRIOR_TOKENS
from quantkit.gptq.quantize import NUM_SWEEPS
from quantkit.gptq.stream import SAMPLE_TOKENS, StreamRequest, stream_words
from quantkit.machine import available_memory_bytes
from quantkit.plan.plan import Plan
from quantkit.plan.smoothed import DOWN, UP
from quantkit.recipe import Recipe
from quantkit.streaming import StreamedModel, Tokens, open_model
from quantkit.transcode import first_device
from quantkit.weights.binding import bind_checkpoint
from quantkit.weights.identity import model_fingerprint
from quantkit.words import Words, finish_words, has_words, open_words, write_words

_DECODED = "decoded"


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
        return words_directory(self.conversion.target)


@contextmanager
def made_words(request: WordsRequest) -> Iterator[Words]:
    """The words, whose directory is nobody else's until the block ends, and is removed where it ends well.

    Raises UsageError where the directory holds words of another run, ResourceError where the disk has no room for all
    that the conversion needs, SourceError for a model that is not run, or words that were damaged since; what headers
    tell of that before there is a directory.
    """
    plan, directory, resume = request.plan, request.directory, request.conversion.resume
    assert plan.recipe.calibration is not None
    check_target(request.conversion.target, plan.checkpoint.directory)
    model = _checked_model(request)
    (needs,) = calibration_needs(plan, streaming=plan.recipe.calibration.streaming)
    check_disk(needs, request.conversion.target, num_tokens=request.tokens.ids_NS.size)
    document = _document(plan)
    # what is known of files has no place in an output, and the words' document goes there
    run = {**document, "source": source_stamps(plan.checkpoint), "modules": _digest_of(int4_shapes(plan))}
    with run_directory(directory, run, resume=resume, has_work=_has_work):
        are_found = has_words(directory)
        if not are_found:
            _make(request, model, document)
        words = open_words(directory)
        if are_found:
            words.check_files()
        words.check_modules(int4_shapes(plan), group_size=plan.recipe.group_size)
        yield words
        with named_errors(directory):
            remove_run(directory)


def _checked_model(request: WordsRequest) -> StreamedModel | None:
    """What is run layer by layer; None where llm-compressor loads it."""
    plan, device = request.plan, first_device(request.conversion.device)
    if plan.recipe.calibration is None or not plan.recipe.calibration.streaming:
        with only_warnings():
            compressor.check_architecture(plan.checkpoint.directory)
        return None
    model = open_model(plan.checkpoint, FAMILIES[plan.family], device=device)
    model.check(request.tokens)
    return model


def _has_work(directory: Path) -> bool:
    """Words of a layer, or of all; or what decoding has made of the source."""
    return any(directory.glob("*.safetensors")) or partial_of(directory / _DECODED).exists()


def _document(plan: Plan) -> dict[str, Any]:
    """What decides the words: the same document, the same run."""
    checkpoint, family, recipe = plan.checkpoint, FAMILIES[plan.family], plan.recipe
    binding = bind_checkpoint(checkpoint, family)
    calibration = recipe.calibration
    assert calibration is not None
    return {
        "method": recipe.method,
        "by": "quantkit" if calibration.streaming else f"llm-compressor {version('llmcompressor')}",
        "transformers": version("transformers"),
        "quantkit": __version__,
        "model": model_fingerprint(binding, family, checkpoint.config).norms,
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


def _make(request: WordsRequest, model: StreamedModel | None, document: Mapping[str, Any]) -> None:
    plan = request.plan
    if model is None:
        _compress(request)
    else:
        _stream(request, model)
    finish_words(request.directory, document, searched=int4_shapes(plan).keys() - chosen_shapes(plan).keys())


def _stream(request: WordsRequest, model: StreamedModel) -> None:
    plan = request.plan
    stream_words(
        StreamRequest(
            model=model,
            tokens=request.tokens,
            shapes=chosen_shapes(plan),
            group_size=plan.recipe.group_size,
            signed=plan.recipe.signed_scales,
            directory=request.directory,
            report_progress=request.conversion.report_progress,
        )
    )


def _compress(request: WordsRequest) -> None:
    """By llm-compressor."""
    plan, recipe = request.plan, request.plan.recipe
    method = compressor.gptq_words if recipe.method == "gptq" else compressor.awq_words
    with _plain_model(request) as model, only_warnings():
        shot = OneShot(
            directory=model,
            modules=frozenset(run_shapes(plan)),
            group_size=recipe.group_size,
            signed=recipe.signed_scales,
            tokens=request.tokens,
            offload=_offload(model, request.directory),
        )
        path = request.directory / "words.safetensors"
        with write_words(path, chosen_shapes(plan), group_size=recipe.group_size) as writer:
            for module, words in method(shot):
                writer.add(module, words)


def _offload(model: Path, directory: Path) -> Path | None:
    """A folder for what memory does not hold."""
    available = available_memory_bytes()
    needed = model_memory_bytes(sum(path.stat().st_size for path in model.glob("*.safetensors")))
    return None if available is None or needed <= available else directory / "offload"


@contextmanager
def _plain_model(request: WordsRequest) -> Iterator[Path]:
    """A directory that transformers loads: the source, or its weights decoded to BF16 for as long as it is needed."""
    conversion, plan = request.conversion, decoded_plan(request.plan)
    if plan is None:
        yield request.plan.checkpoint.directory
        return
    target = request.directory / _DECODED
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
