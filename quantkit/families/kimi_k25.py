"""Kimi K2.5 and K2.6: Kimi K2 below ``language_model.``, with a vision tower and a projector.

The config nests the language model under ``text_config``. Vision names are those that the vendor stores.
"""

from collections.abc import Iterator

from quantkit.families import decoder, roles
from quantkit.families.config_values import Config, integer, pair, section, text_config
from quantkit.families.decoder import plain
from quantkit.families.family import FAMILIES, ExpectedTensor, Family, Role
from quantkit.families.kv_shape import latent_kv

_VISION_ROOT = "vision_tower."


def _with_bias(module: str, rows: int, *cols: int) -> Iterator[ExpectedTensor]:
    """A weight [rows, *cols] and a bias [rows], both of the vision part."""
    yield plain(f"{module}.weight", (rows, *cols), Role.VISION)
    yield plain(f"{module}.bias", (rows,), Role.VISION)


def _vision(config: Config) -> Iterator[ExpectedTensor]:
    width, inner = integer(config, "vt_hidden_size"), integer(config, "vt_intermediate_size")
    height, across = integer(config, "init_pos_emb_height"), integer(config, "init_pos_emb_width")
    patch = integer(config, "patch_size")
    yield from _with_bias(f"{_VISION_ROOT}patch_embed.proj", width, 3, patch, patch)
    yield plain(f"{_VISION_ROOT}patch_embed.pos_emb.weight", (height, across, width), Role.VISION)
    for index in range(integer(config, "vt_num_hidden_layers")):
        block = f"{_VISION_ROOT}encoder.blocks.{index}."
        yield from _with_bias(f"{block}norm0", width)
        yield from _with_bias(f"{block}norm1", width)
        yield from _with_bias(f"{block}wqkv", 3 * width, width)
        yield from _with_bias(f"{block}wo", width, width)
        yield from _with_bias(f"{block}mlp.fc0", inner, width)
        yield from _with_bias(f"{block}mlp.fc1", width, inner)
    yield from _with_bias(f"{_VISION_ROOT}encoder.final_layernorm", width)


def _projector(config: Config) -> Iterator[ExpectedTensor]:
    """Merges a few neighbouring patches (2 x 2 unless the config says otherwise), then two linear layers."""
    width = integer(config, "mm_hidden_size")
    kernel = pair(config, "merge_kernel_size", (2, 2))
    merged = width * kernel[0] * kernel[1]
    yield from _with_bias("mm_projector.pre_norm", width)
    yield from _with_bias("mm_projector.proj.0", merged, merged)
    yield from _with_bias("mm_projector.proj.2", integer(config, "text_hidden_size"), merged)


def _tensors(config: Config, root: str) -> Iterator[ExpectedTensor]:
    yield from decoder.causal_lm(text_config(config), root, decoder.mla)
    vision = section(config, "vision_config")
    if vision is not None:
        yield from _vision(vision)
        yield from _projector(vision)


FAMILIES.add(
    "kimi_k25",
    Family(
        name="kimi_k25",
        model_types=("kimi_k25",),
        roles=roles.EXPERTS + roles.KV_SCALES + roles.VISION + roles.MLP + roles.MLA + roles.ENDS,
        tensors=_tensors,
        kv_shape=latent_kv,
        ignore=roles.IGNORE_ALL_BUT_EXPERTS + roles.IGNORE_VISION,
        text_root="language_model.model.",
    ),
)
