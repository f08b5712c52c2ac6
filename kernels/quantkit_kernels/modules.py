"""INT4 weights as torch modules: loaded under the names of a converted checkpoint, repacked once, saved as they were.

A module holds the kernels' order of words; its state dict holds the checkpoint's, bit for bit. Scales are kept as bits,
int16, so that ``model.half()`` and the like leave them alone.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from quantkit_kernels.ops import int4_experts, int4_linear
from quantkit_kernels.word_order import TILE_COLS, Int4Weight, check_weight, repack, unrepack

PARTS = ("weight_packed", "weight_scale", "weight_shape")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
Device = torch.device | str | int | None


class Int4Linear(nn.Module):
    """``nn.Linear`` with INT4 groups; its state dict: ``weight_packed``, ``weight_scale``, ``weight_shape``."""

    words: Tensor
    scale: Tensor

    def __init__(
        self, in_features: int, out_features: int, *, group_size: int, bias: Tensor | None = None, device: Device = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        _register(self, "", (out_features,), in_features, group_size, device)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        out: Tensor = int4_linear(x, self.words, _bf16(self.scale), self.group_size)
        return out if self.bias is None else out + self.bias

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The three parts of a checkpoint. Raises ValueError for another shape."""
        shape = (self.out_features, self.in_features)
        tiles = _repacked(tensors, shape, group_size=self.group_size, device=self.words.device)
        self.words.copy_(tiles.words)
        self.scale.copy_(tiles.scale.view(torch.int16))

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        tiles = Int4Weight(self.words, _bf16(self.scale))
        parts = _parts(tiles, self.in_features, self.group_size)
        destination |= {prefix + name: part for name, part in parts.items()}
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        prefix: str,
        local_metadata: Mapping[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        tensors = _taken(state_dict, prefix, PARTS, missing_keys)
        if tensors is not None:
            _try(error_msgs, prefix, partial(self.load, tensors))
        if self.bias is not None and prefix + "bias" in state_dict:
            with torch.no_grad():
                self.bias.copy_(state_dict[prefix + "bias"])
        elif self.bias is not None:
            missing_keys.append(prefix + "bias")
        if strict:
            known = {prefix + name for name in (*PARTS, *(() if self.bias is None else ("bias",)))}
            unexpected_keys += [name for name in state_dict if name.startswith(prefix) and name not in known]


class Int4Experts(nn.Module):
    """Routed experts: ``N.gate_proj``, ``N.up_proj``, ``N.down_proj`` with the three parts of each.

    Takes the place of the experts of transformers' MoE layers, and has their ``forward``. ``expert_map`` int32 [global
    experts]: where only some of them are here, their local numbers, -1 for the others.
    """

    gate_up_words: Tensor
    gate_up_scale: Tensor
    down_words: Tensor
    down_scale: Tensor

    def __init__(
        self,
        num_experts: int,
        hidden_dim: int,
        intermediate_dim: int,
        *,
        group_size: int,
        expert_map: Tensor | None = None,
        device: Device = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.hidden_dim, self.intermediate_dim = num_experts, hidden_dim, intermediate_dim
        self.group_size = group_size
        _register(self, "gate_up_", (num_experts, 2 * intermediate_dim), hidden_dim, group_size, device)
        _register(self, "down_", (num_experts, hidden_dim), intermediate_dim, group_size, device)
        self.register_buffer("expert_map", expert_map, persistent=False)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, hidden], [T, k], [T, k] to [T, hidden]."""
        out: Tensor = int4_experts(
            hidden_states,
            self.gate_up_words,
            _bf16(self.gate_up_scale),
            self.down_words,
            _bf16(self.down_scale),
            top_k_weights,
            top_k_index,
            self.group_size,
            self.expert_map,
        )
        return out

    def load_expert(self, expert: int, tensors: Mapping[str, Tensor]) -> None:
        """One expert's nine tensors, named from ``gate_proj.weight_packed`` on. Raises ValueError for other shapes."""
        places = {
            "gate_proj": (self.gate_up_words, self.gate_up_scale, slice(0, self.intermediate_dim)),
            "up_proj": (self.gate_up_words, self.gate_up_scale, slice(self.intermediate_dim, None)),
            "down_proj": (self.down_words, self.down_scale, slice(None)),
        }
        for name, (words, scale, rows) in places.items():
            parts = {part: tensors[f"{name}.{part}"] for part in PARTS}
            tiles = _repacked(parts, self._shape(name), group_size=self.group_size, device=words.device)
            words[expert, :, rows].copy_(tiles.words)
            scale[expert, :, rows].copy_(tiles.scale.view(torch.int16))

    def expert_tensors(self, expert: int) -> dict[str, Tensor]:
        """What ``load_expert`` takes."""
        width = self.intermediate_dim
        gate_up = (self.gate_up_words[expert], _bf16(self.gate_up_scale[expert]))
        found = {
            "gate_proj": Int4Weight(gate_up[0][:, :width], gate_up[1][:, :width]),
            "up_proj": Int4Weight(gate_up[0][:, width:], gate_up[1][:, width:]),
            "down_proj": Int4Weight(self.down_words[expert], _bf16(self.down_scale[expert])),
        }
        return {
            f"{name}.{part}": tensor
            for name, tiles in found.items()
            for part, tensor in _parts(tiles, self._shape(name)[1], self.group_size).items()
        }

    def _shape(self, projection: str) -> tuple[int, int]:
        if projection == "down_proj":
            return self.hidden_dim, self.intermediate_dim
        return self.intermediate_dim, self.hidden_dim

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        for expert in range(self.num_experts):
            parts = self.expert_tensors(expert)
            destination |= {f"{prefix}{expert}.{name}": part for name, part in parts.items()}

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        prefix: str,
        local_metadata: Mapping[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known = set()
        for expert in range(self.num_experts):
            names = [f"{expert}.{projection}.{part}" for projection in PROJECTIONS for part in PARTS]
            known |= {prefix + name for name in names}
            tensors = _taken(state_dict, prefix, names, missing_keys)
            if tensors is not None:
                own = {name.split(".", 1)[1]: tensor for name, tensor in tensors.items()}
                _try(error_msgs, prefix, partial(self.load_expert, expert, own))
        if strict:
            unexpected_keys += [name for name in state_dict if name.startswith(prefix) and name not in known]


def _bf16(bits: Tensor) -> Tensor:
    return bits.view(torch.bfloat16)


def _register(
    module: nn.Module, prefix: str, leading: tuple[int, ...], num_cols: int, group_size: int, device: Device
) -> None:
    num_tiles = -(-num_cols // TILE_COLS)
    shape = (*leading[:-1], num_tiles, leading[-1])
    words = torch.zeros((*shape, TILE_COLS // 8), dtype=torch.int32, device=device)
    scale = torch.zeros((*shape, TILE_COLS // group_size), dtype=torch.int16, device=device)
    module.register_buffer(prefix + "words", words)
    module.register_buffer(prefix + "scale", scale)


def _repacked(tensors: Mapping[str, Tensor], shape: tuple[int, int], *, group_size: int, device: Device) -> Int4Weight:
    packed, scale, stored = (tensors[part] for part in PARTS)
    if tuple(stored.tolist()) != shape or packed.ndim != 2:
        raise ValueError(f"a weight {shape} is stored as words {tuple(packed.shape)} of {tuple(stored.tolist())}")
    check_weight(Int4Weight(packed, scale), num_rows=shape[0], num_cols=shape[1], group_size=group_size)
    return repack(packed.to(device), scale.to(device), group_size=group_size)


def _parts(tiles: Int4Weight, num_cols: int, group_size: int) -> dict[str, Tensor]:
    packed, scale = unrepack(tiles, num_cols=num_cols, group_size=group_size)
    return dict(zip(PARTS, (packed, scale, torch.tensor([len(packed), num_cols], dtype=torch.int64)), strict=True))


def _taken(
    state_dict: Mapping[str, Tensor], prefix: str, names: Iterable[str], missing_keys: list[str]
) -> dict[str, Tensor] | None:
    missing = [prefix + name for name in names if prefix + name not in state_dict]
    missing_keys += missing
    return None if missing else {name: state_dict[prefix + name] for name in names}


def _try(error_msgs: list[str], prefix: str, load: Callable[[], None]) -> None:
    try:
        load()
    except ValueError as error:
        error_msgs.append(f"{prefix.removesuffix('.')}: {error}")
