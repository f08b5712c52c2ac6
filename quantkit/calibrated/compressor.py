"""Codes and scales by llm-compressor's oneshot, of a model that this machine's memory holds.

Suffixes: ``R`` rows, ``C`` columns, ``G`` groups along C.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.errors import SourceError, UsageError, VerificationError, first_line
from quantkit.numerics.bfloat16 import from_float32
from quantkit.numerics.packing import Int4Words, pack_int4
from quantkit.plan.smoothed import DOWN, UP
from quantkit.streaming import Tokens
from quantkit.streaming.architectures import CONFIG_ERRORS, MODEL_ERRORS
from quantkit.streaming.devices import named_memory_errors
from quantkit.transcode import search_values

DAMPING = 0.01  # of the mean of the diagonal, as is its default
FARTHEST = 1 / 32
"""Of a weight from its code, in steps: it is code times scale, rounded to BF16, which moves a number by at most 2^-8 of
itself (half a unit of eight bits), and no code is larger than 8."""
_STREAM = "give --streaming, which holds a few layers at a time"
# of transformers' own code alone; what looks for the class of a config takes more of it apart than the class does
_CONFIG_ERRORS = (*CONFIG_ERRORS, OSError, AttributeError)
_MODEL_ERRORS = (*MODEL_ERRORS, AttributeError)
_WEIGHTS_ERRORS = (OSError, ValueError, RuntimeError)  # the config has been tried before


@dataclass(frozen=True, slots=True, kw_only=True)
class OneShot:
    """``directory``: the model in BF16, as transformers loads it. ``modules``: what becomes INT4, as it names them.

    ``offload``: where to put what memory does not hold; None where it holds all.
    """

    directory: Path
    modules: frozenset[str]
    group_size: int
    signed: bool
    tokens: Tokens
    offload: Path | None = None


@contextmanager
def _quantized_model(shot: OneShot, modifiers: list[Any]) -> Iterator[Any]:
    """The model behind llm-compressor's oneshot: layer by layer, every expert of it run on every token.

    Raises SourceError for a model that transformers does not load, ResourceError where memory ends.
    """
    import llmcompressor
    from torch.utils.data import DataLoader

    oneshot: Any = llmcompressor.oneshot  # type: ignore[attr-defined]

    model = _load(shot)
    rows: Any = list(shot.tokens.ids)
    length = shot.tokens.ids_NS.shape[1]

    def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = torch.stack(rows)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    with _without_pinning(), named_memory_errors(shot.directory, remedy=_STREAM):
        oneshot(
            model=model,
            processor=object(),  # it asks for one, and uses none where the data is tokens
            dataset=DataLoader(rows, batch_size=1, collate_fn=collate),
            recipe=modifiers,
            pipeline="sequential",
            moe_calibrate_all_experts=True,
            num_calibration_samples=len(shot.tokens.ids_NS),
            max_seq_length=length,
        )
    yield model


def check_architecture(directory: Path) -> None:
    """Raise SourceError where transformers has no class for a model: before anything of it is decoded."""
    import transformers

    read_config: Any = transformers.AutoConfig.from_pretrained
    build: Any = transformers.AutoModelForCausalLM.from_config
    try:
        config = read_config(directory, trust_remote_code=False, local_files_only=True)
    except _CONFIG_ERRORS as error:
        raise _not_loaded(directory, error) from error
    try:
        with torch.device("meta"):
            build(config, trust_remote_code=False)
    except _MODEL_ERRORS as error:
        raise _not_loaded(directory, error) from error


def _not_loaded(directory: Path, error: Exception) -> SourceError:
    return SourceError(
        f"transformers does not load it ({first_line(error)})",
        file=directory,
        remedy="give --streaming, or install the transformers release that knows it",
    )


def _load(shot: OneShot) -> Any:
    from compressed_tensors.offload import load_offloaded_model
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.bfloat16, "trust_remote_code": False, "local_files_only": True}
    if shot.offload is not None:
        options |= {"device_map": "auto_offload", "offload_folder": str(shot.offload)}
    try:
        loading = nullcontext() if shot.offload is None else load_offloaded_model()
        with named_memory_errors(shot.directory, remedy=_STREAM), loading:
            model = AutoModelForCausalLM.from_pretrained(shot.directory, **options)
    except _WEIGHTS_ERRORS as error:
        raise _not_loaded(shot.directory, error) from error
    linearize_moe(model)
    there = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    missing = sorted(shot.modules - there)
    if missing:
        raise SourceError(
            f"transformers has no such Linear (and {len(missing) - 1} more are missing)",
            tensor=missing[0],
            file=shot.directory,
            remedy="give --streaming, or --targets that name Linears of its model",
        )
    hit = {name for name in there if any(re.fullmatch(one, name) for one in patterns(shot.modules))}
    if hit != shot.modules:
        raise UsageError(
            f"no pattern tells {sorted(hit - shot.modules)[0]} from modules that become INT4",
            remedy="choose --targets and --ignore that treat all layers and experts alike, or give --streaming",
        )
    return model


@contextmanager
def _without_pinning() -> Iterator[None]:
    """Pinned memory is for copies to a GPU: without one torch refuses it, and AWQ asks for it all the same."""
    from compressed_tensors.utils import patch_attr
    from llmcompressor.pipelines.cache import IntermediatesCache

    if torch.accelerator.is_available():
        yield
        return
    with patch_attr(IntermediatesCache, "pin_memory", lambda *_: None):
        yield


def patterns(modules: Iterable[str]) -> list[str]:
    """Regular expressions for names that differ in numbers alone: 57,600 names would be compared one by one."""
    return sorted({re.sub(r"\d+", lambda _: r"\d+", re.escape(name)) for name in modules})


def gptq_words(shot: OneShot) -> Iterator[tuple[str, Int4Words]]:
    """GPTQ with scales of the largest magnitude, columns in the order of their second moments."""
    from llmcompressor.modifiers.gptq import GPTQModifier

    modifier = GPTQModifier(config_groups=_scheme(shot), dampening_frac=DAMPING, actorder="static")
    with _quantized_model(shot, [modifier]) as model:
        for name in sorted(shot.modules):
            module = model.get_submodule(name)
            weight_RC, scale_RG = (part.detach().float().cpu() for part in (module.weight, module.weight_scale))
            codes_RC = recovered_codes(name, weight_RC, scale_RG, group_size=shot.group_size)
            yield name, Int4Words(pack_int4(codes_RC), from_float32(scale_RG.numpy()))


def recovered_codes(
    module: str, weight_RC: torch.Tensor, scale_RG: torch.Tensor, *, group_size: int
) -> NDArray[np.int8]:
    """[R, C] of weights that lie on the grid of their scales, as llm-compressor leaves them in memory.

    Raises VerificationError for a weight that does not: its code would be a guess.
    """
    steps_RC = weight_RC / scale_RG.repeat_interleave(group_size, dim=1)
    codes_RC = torch.round(steps_RC).clamp(-8, 7)
    is_wrong_RC = ~((steps_RC - codes_RC).abs() <= FARTHEST)  # NaN is near nothing
    if bool(is_wrong_RC.any()):
        row, column = divmod(int(is_wrong_RC.int().argmax()), weight_RC.shape[1])
        raise VerificationError(
            f"llm-compressor left a weight {float(steps_RC[row, column]):.4g} steps of its scale from zero, "
            f"which is no INT4 code (row {row}, column {column})",
            tensor=module,
            remedy="give --streaming, which does without llm-compressor, or install another release of it",
        )
    return codes_RC.to(torch.int8).numpy()


def awq_words(shot: OneShot) -> Iterator[tuple[str, Int4Words]]:
    """AWQ between up and down alone, which no other module notices; then the search on what it made of them."""
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier

    ups = [one for one in patterns(shot.modules) if one.endswith(UP)]
    pairs = [AWQMapping(f"re:{one}$", [f"re:{one.removesuffix(UP)}{DOWN}$"]) for one in ups]
    modifiers = [AWQModifier(mappings=pairs, offload_device=None), QuantizationModifier(config_groups=_scheme(shot))]
    with _quantized_model(shot, modifiers) as model:
        for name in sorted(name for name in shot.modules if name.endswith((UP, DOWN))):
            weight_RC = model.get_submodule(name).weight.detach().float().cpu().numpy()
            codes_RC, scale_RG = search_values(
                weight_RC, group_size=shot.group_size, signed=shot.signed, moments_C=None
            )
            yield name, Int4Words(pack_int4(codes_RC), scale_RG)


def _scheme(shot: OneShot) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": shot.group_size}
    return {"group_0": {"targets": [f"re:{one}$" for one in patterns(shot.modules)], "weights": weights}}
