"""Which of transformers' classes runs a checkpoint: its own code, never a checkpoint's."""

from collections.abc import Mapping
from typing import Any

import torch

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
    import transformers

    stem = _CLASSES[model_type]
    options = {key: value for key, value in text_config.items() if key not in _NOT_OF_THE_MODEL}
    try:
        config = getattr(transformers, f"{stem}Config")(**options)
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            model = getattr(transformers, f"{stem}ForCausalLM")(config)
        # its frequencies are computed, not loaded
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, ZeroDivisionError, RuntimeError) as error:
        raise SourceError(
            f"transformers cannot build {stem} from it ({first_line(error)})",
            file=CONFIG_NAME,
            remedy="download config.json again, or install the transformers release that knows it",
        ) from error
    return model.eval()
