"""Which of transformers' classes runs a checkpoint: its own code, never a checkpoint's."""

from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from quantkit.checkpoint.file_names import CONFIG_NAME
from quantkit.errors import SourceError, first_line

# model_type of the text config -> stem of the names of transformers' config and model class
_CLASSES: Mapping[str, str] = {
    "glm_moe_dsa": "GlmMoeDsa",
    "glm4_moe": "Glm4Moe",
    "deepseek_v3": "DeepseekV3",
    "kimi_k2": "DeepseekV3",
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
}
# what transformers' own classes raise of a config that cannot be: by what is caught, nothing of ours is called
CONFIG_ERRORS = (StrictDataclassError, ValueError, TypeError, KeyError)
MODEL_ERRORS = (ValueError, TypeError, KeyError, IndexError, ZeroDivisionError, RuntimeError)
_NEWER = "install the transformers release that knows it"
_NOT_OF_THE_MODEL = ("quantization_config", "compression_config", "auto_map", "model_type", "dtype", "torch_dtype")


def build_skeleton(text_config: Mapping[str, Any]) -> Any:
    """The ForCausalLM of a text config with all weights on the meta device, in evaluation mode.

    Raises SourceError for an architecture that is not supported, or a config that transformers refuses.
    """
    model_type = str(text_config.get("model_type"))
    if model_type not in _CLASSES:
        raise SourceError(
            f"model_type {model_type!r} cannot be run layer by layer",
            file=CONFIG_NAME,
            remedy=f"supported: {', '.join(_CLASSES)}",
        )
    stem = _CLASSES[model_type]
    options = {key: value for key, value in text_config.items() if key not in _NOT_OF_THE_MODEL}
    config_class, model_class = (_class_of(f"{stem}{kind}") for kind in ("Config", "ForCausalLM"))
    try:
        config = config_class(**options)
    except CONFIG_ERRORS as error:
        raise _refused(stem, error) from error
    config._attn_implementation = "sdpa"
    try:
        with torch.device("meta"):
            model = model_class(config)
    except MODEL_ERRORS as error:
        raise _refused(stem, error) from error
    # its frequencies are computed, not loaded
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model.eval()


def _class_of(name: str) -> Any:
    import transformers  # it takes seconds, and much is checked before

    found = getattr(transformers, name, None)
    if found is None:
        raise SourceError(f"this release of transformers has no {name}", file=CONFIG_NAME, remedy=_NEWER)
    return found


def _refused(stem: str, error: Exception) -> SourceError:
    return SourceError(
        f"transformers cannot build {stem} from it ({first_line(error)})",
        file=CONFIG_NAME,
        remedy=f"download config.json again, or {_NEWER}",
    )
