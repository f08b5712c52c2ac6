"""INT4 weights as torch modules: loaded under the names of a converted checkpoint, repacked once, saved as they were.

A module holds the kernels' order of words; its state dict holds the checkpoint's, bit for bit. Scales are kept as bits,
int16, so that ``model.half()`` and the like leave them alone. For inference only: no gradient passes.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from quantkit_kernels.module_parts import PARTS, Device, check_bias, check_sizes, check_taken, repacked, stored_parts
from quantkit_kernels.ops import int4_experts, int4_linear
from quantkit_kernels.word_order import TILE_COLS, Int4Weight

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Int4Linear(nn.Module):
    """``nn.Linear`` with INT4 groups; its state dict: ``weight_packed``, ``weight_scale``, ``weight_shape``.

    Raises ValueError for columns that are no whole groups, and for a ``bias`` that is not [out_features].
    """

    words: Tensor
    scale: Tensor

    def __init__(
        self, in_features: int, out_features: int, *, group_size: int, bias: Tensor | None = None, device: Device = None
    ) -> None:
        super().__init__()
        check_sizes(group_size, columns={"in_features": in_features}, others={"out_features": out_features})
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        _register(self, "", (out_features,), in_features, group_size, device)
        self.bias: nn.Parameter | None = None
        if bias is not None:
            check_bias(bias, out_features)
            self.bias = nn.Parameter(bias.detach().to(self.words.device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out], in the dtype of ``x``."""
        out: Tensor = int4_linear(x, self.words, _bf16(self.scale), self.group_size)
        return out if self.bias is None else (out + self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, group_size={self.group_size}, bias={self.bias is not None}"

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The three parts of a checkpoint, and ``bias`` where the module has one; without it the bias stays.

        Raises ValueError for parts that are missing, of another shape or dtype, and for tensors beside them.
        """
        shape = (self.out_features, self.in_features)
        check_taken(tensors, PARTS, optional=() if self.bias is None else ("bias",))
        _check_memory(self.words)
        tiles = repacked(tensors, shape, group_size=self.group_size, device=self.words.device)
        if self.bias is not None and "bias" in tensors:
            check_bias(tensors["bias"], self.out_features)
            with torch.no_grad():
                self.bias.copy_(tensors["bias"])
        self.words.copy_(tiles.words)
        self.scale.copy_(tiles.scale.view(torch.int16))

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        tiles = Int4Weight(self.words, _bf16(self.scale))
        parts = stored_parts(tiles, self.in_features, self.group_size)
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
        names = PARTS if self.bias is None else (*PARTS, "bias")
        tensors = _taken(state_dict, prefix, names, missing_keys)
        if tensors is not None:
            if local_metadata.get("assign_to_params_buffers"):
                _place(self, tensors[PARTS[0]].device)
            _try(error_msgs, prefix, partial(self.load, tensors))
        if strict:
            known = {prefix + name for name in names}
            unexpected_keys += [name for name in state_dict if name.startswith(prefix) and name not in known]


class Int4Experts(nn.Module):
    """Routed experts: ``N.gate_proj``, ``N.up_proj``, ``N.down_proj`` with the three parts of each.

    Takes the place of the experts of transformers' MoE layers, and has their ``forward``. ``expert_map`` int32 [global
    experts]: where only some of them are here, their local numbers, -1 for the others. ``N`` in a state dict is the
    local number. Raises ValueError for columns that are no whole groups, and for a map to experts that are not here.
    """

    gate_up_words: Tensor
    gate_up_scale: Tensor
    down_words: Tensor
    down_scale: Tensor
    expert_map: Tensor | None

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
        columns = {"hidden_dim": hidden_dim, "intermediate_dim": intermediate_dim}
        check_sizes(group_size, columns=columns, others={"num_experts": num_experts})
        self.num_experts, self.hidden_dim, self.intermediate_dim = num_experts, hidden_dim, intermediate_dim
        self.group_size = group_size
        _register(self, "gate_up_", (num_experts, 2 * intermediate_dim), hidden_dim, group_size, device)
        _register(self, "down_", (num_experts, hidden_dim), intermediate_dim, group_size, device)
        if expert_map is not None:
            _check_map(expert_map, num_experts)
            expert_map = _follow(expert_map, self.gate_up_words)
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

    def extra_repr(self) -> str:
        sizes = f"num_experts={self.num_experts}, hidden_dim={self.hidden_dim}"
        return f"{sizes}, intermediate_dim={self.intermediate_dim}, group_size={self.group_size}"

    def load_expert(self, expert: int, tensors: Mapping[str, Tensor]) -> None:
        """One expert's nine tensors, named from ``gate_proj.weight_packed`` on; ``expert`` is its local number.

        Raises ValueError for an expert that is not here, and for tensors as ``Int4Linear.load`` does.
        """
        if not 0 <= expert < self.num_experts:
            raise ValueError(f"there is no expert {expert} of {self.num_experts}")
        check_taken(tensors, [f"{name}.{part}" for name in PROJECTIONS for part in PARTS])
        _check_memory(self.gate_up_words)
        places = {
            "gate_proj": (self.gate_up_words, self.gate_up_scale, slice(0, self.intermediate_dim)),
            "up_proj": (self.gate_up_words, self.gate_up_scale, slice(self.intermediate_dim, None)),
            "down_proj": (self.down_words, self.down_scale, slice(None)),
        }
        for name, (words, scale, rows) in places.items():
            parts = {part: tensors[f"{name}.{part}"] for part in PARTS}
            tiles = repacked(parts, self._shape(name), group_size=self.group_size, device=words.device)
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
            for part, tensor in stored_parts(tiles, self._shape(name)[1], self.group_size).items()
        }

    def _shape(self, projection: str) -> tuple[int, int]:
        if projection == "down_proj":
            return self.hidden_dim, self.intermediate_dim
        return self.intermediate_dim, self.hidden_dim

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """``to_empty`` would lose the map, which no state dict has."""
        kept = self.expert_map
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if kept is not None:
            self.expert_map = _follow(kept, self.gate_up_words)
        return self

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
                if local_metadata.get("assign_to_params_buffers"):
                    _place(self, tensors[names[0]].device)
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


def _place(module: nn.Module, device: torch.device) -> None:
    """Everything on another device; zeros where there was no memory."""
    if device.type != "meta":
        move = partial(_moved, device=device)
        module._apply(move)  # type: ignore[no-untyped-call]


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


def _check_memory(words: Tensor) -> None:
    if words.is_meta:
        raise ValueError("the module is on meta: give it memory (to_empty), or load_state_dict with assign=True")


def _check_map(expert_map: Tensor, num_experts: int) -> None:
    if expert_map.dtype not in (torch.int32, torch.int64) or expert_map.ndim != 1:
        raise ValueError(f"expert_map is int32 [global experts], not {expert_map.dtype} {tuple(expert_map.shape)}")
    if not expert_map.is_meta and bool(((expert_map < -1) | (expert_map >= num_experts)).any()):
        raise ValueError(f"expert_map has numbers beside -1 and those of {num_experts} experts, 0 to {num_experts - 1}")


def _follow(expert_map: Tensor, words: Tensor) -> Tensor:
    """The map where the words are; on meta it would be lost."""
    return expert_map if words.is_meta else expert_map.to(words.device)


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
