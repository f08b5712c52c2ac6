"""A checkpoint as a model that is never in memory as a whole. Legend: T tokens, H hidden size, V vocabulary."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import SourceError, UsageError
from quantkit.families.family import Family
from quantkit.module_names import layer_name, layer_of
from quantkit.streaming.ahead import ahead
from quantkit.streaming.architectures import build_skeleton
from quantkit.streaming.decode import check_known, decode_rows, decode_weight
from quantkit.streaming.devices import named_memory_errors
from quantkit.streaming.experts import ExpertWeights
from quantkit.streaming.layer import StreamedLayer
from quantkit.streaming.states import States, open_states
from quantkit.streaming.tokens import Tokens
from quantkit.weights.binding import Binding, bind_checkpoint
from quantkit.weights.completeness import text_root
from quantkit.weights.weight import Weight

_EMBEDDED_TOKENS = 1 << 13  # at a time: 200 MB where a token has 6,144 channels
HEAD_ROWS = 8192  # of the vocabulary that are in memory at a time
_EXPERTS = "mlp.experts"


@dataclass(kw_only=True)
class StreamedModel:
    """``skeleton``: transformers' ForCausalLM, its weights on the meta device."""

    checkpoint: Checkpoint
    family: Family
    binding: Binding
    skeleton: Any
    device: torch.device
    dtype: torch.dtype
    _calls: dict[tuple[int, int], list[Mapping[str, Any]]] = field(default_factory=dict)
    # asked by the thread that loads ahead, while another records calls with other layers in their place
    _layer_classes: tuple[type[nn.Module], ...] = field(init=False)

    def __post_init__(self) -> None:
        self._layer_classes = tuple(type(layer) for layer in self.skeleton.model.layers)

    @property
    def num_layers(self) -> int:
        return len(self._layer_classes)

    @property
    def hidden_size(self) -> int:
        return int(self.skeleton.config.hidden_size)

    @property
    def vocabulary(self) -> int:
        return int(self.skeleton.config.vocab_size)

    @property
    def root(self) -> str:
        """What stands before ``layers.``."""
        return text_root(self.binding)

    def layer_bytes(self) -> list[int]:
        """Stored bytes of each layer, experts included."""
        sizes, root = [0] * self.num_layers, self.root
        for weight in self.binding.weights.values():
            layer = layer_of(weight.name)
            if layer is not None and layer.root == root and layer.number < len(sizes):
                sizes[layer.number] += weight.stored_bytes
        return sizes

    def check(self, tokens: Tokens) -> None:
        """What a run over these tokens would end with, or not mean, as headers tell it.

        Raises SourceError for a weight that is missing, of another shape or of no known form, UsageError for sequences
        longer than the model reads.
        """
        length, most = tokens.ids_NS.shape[1], int(self.skeleton.config.max_position_embeddings)
        if length > most:
            what = f"sequences of {length:,} tokens are longer than this model reads"
            raise UsageError(what, remedy=f"at most {most:,}")
        for index in range(self.num_layers):
            name, module, _ = self._bound(index)
            self._experts(name, module)
        self._weight(self._norm_name, self.skeleton.model.norm.weight.shape)
        _ = self.embedding_weight, self.head_weight

    def embed(self, ids_T: Tensor) -> Tensor:
        """[T, H] of token ids; only their rows are read."""
        weight = self.embedding_weight
        unique, places_T = torch.unique(ids_T, return_inverse=True)
        rows = [decode_rows(weight, row, row + 1) for row in unique.tolist()]
        return torch.cat(rows).to(self.dtype)[places_T]

    def layer(self, index: int) -> StreamedLayer:
        """Load one layer without its experts, which is alive as long as the caller holds it. Any thread may do it.

        Raises ResourceError where memory ends, as all that loads here.
        """
        name, module, weights = self._bound(index)
        for inner, weight in weights.items():
            with named_memory_errors(weight.name):
                _fill(module, inner, decode_weight(weight).to(self.device, self._dtype_of(inner)))
        return StreamedLayer(
            index=index,
            name=name,
            module=module,
            experts=self._experts(name, module),
            arguments=partial(self._arguments, index),
            device=self.device,
            dtype=self.dtype,
        )

    def layers(self, first: int = 0) -> Iterator[StreamedLayer]:
        """Layers from ``first`` on, the next one loaded while one is used: let go of it before asking for another."""
        return ahead(partial(self.layer, index) for index in range(first, self.num_layers))

    def normed(self, hidden_TH: Tensor) -> Tensor:
        """[T, H] what the head takes."""
        norm = self.skeleton.model.norm
        weight = self._weight(self._norm_name, norm.weight.shape)
        with torch.no_grad(), named_memory_errors(weight.name):
            _fill(norm, "weight", decode_weight(weight).to(self.device, self.dtype))
            answer: Tensor = norm(hidden_TH.to(self.device))
        return answer

    def head_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """First row and rows of the head [rows, H], a block at a time."""
        weight = self.head_weight
        for first in range(0, weight.num_rows, HEAD_ROWS):
            with named_memory_errors(weight.name):
                block = decode_rows(weight, first, min(first + HEAD_ROWS, weight.num_rows))
                block = block.to(self.device, self.dtype)
            yield first, block

    @property
    def embedding_weight(self) -> Weight:
        return self._weight(f"{self.root}embed_tokens.weight", (self.vocabulary, self.hidden_size))

    @property
    def head_weight(self) -> Weight:
        """The embedding, where the two are tied."""
        if self.skeleton.config.tie_word_embeddings:
            return self.embedding_weight
        name = f"{self.root.removesuffix('model.')}lm_head.weight"
        return self._weight(name, (self.vocabulary, self.hidden_size))

    @property
    def _norm_name(self) -> str:
        return f"{self.root}norm.weight"

    @torch.no_grad()
    def logits(self, hidden_TH: Tensor) -> Tensor:
        """float32 [T, V] of the states behind the last layer."""
        normed_TH = self.normed(hidden_TH)
        with named_memory_errors(self.head_weight.name):
            logits_TV = torch.empty(len(hidden_TH), self.vocabulary)
            for first, block in self.head_blocks():
                logits_TV[:, first : first + len(block)] = F.linear(normed_TH, block)
        return logits_TV

    def _bound(self, index: int) -> tuple[str, nn.Module, dict[str, Weight]]:
        """Name of a layer, its module on the meta device, and its weights without the experts."""
        with torch.device("meta"):
            module = self._layer_classes[index](self.skeleton.config, index).eval()
        name = layer_name(self.root, index)
        slots = {inner: slot for inner, slot in _slots(module) if not inner.startswith(f"{_EXPERTS}.")}
        return name, module, {inner: self._weight(f"{name}.{inner}", slot.shape) for inner, slot in slots.items()}

    def _experts(self, name: str, module: nn.Module) -> ExpertWeights | None:
        block: Any = module.mlp
        if not hasattr(block, "experts"):
            return None
        gate, up, down = self.family.expert_dims
        prefix = f"{name}.{_EXPERTS}"
        _, width, channels = block.experts.gate_up_proj.shape
        inner = (width // 2, channels)
        parts = (("gate", gate, inner), ("up", up, inner), ("down", down, inner[::-1]))
        weights = tuple(
            {part: self._weight(f"{prefix}.{number}.{leaf}.weight", shape) for part, leaf, shape in parts}
            for number in range(block.experts.num_experts)
        )
        return ExpertWeights(name=prefix, weights=weights, activation=block.experts.act_fn)

    def _weight(self, name: str, shape: Sequence[int]) -> Weight:
        found = self.binding.weights.get(name)
        if found is None:
            raise SourceError("is missing", tensor=name, remedy="download the checkpoint again")
        if found.shape != tuple(shape):
            raise SourceError(
                f"is {list(found.shape)}, transformers expects {list(shape)}",
                tensor=name,
                remedy="config.json and the shards belong to different checkpoints",
            )
        check_known(found)
        return found

    def _dtype_of(self, inner: str) -> torch.dtype:
        kept = getattr(self.skeleton, "_keep_in_fp32_modules_strict", None) or ()
        return torch.float32 if any(part in inner for part in kept) else self.dtype

    def _arguments(self, index: int, num_sequences: int, length: int) -> Mapping[str, Any]:
        key = (num_sequences, length)
        if key not in self._calls:
            self._calls = {key: self._record_calls(num_sequences, length)}  # masks are large: one shape at a time
        return self._calls[key][index]

    def _record_calls(self, num_sequences: int, length: int) -> list[Mapping[str, Any]]:
        """How transformers' own forward calls each layer: masks, rotary tables, positions."""
        body = self.skeleton.model
        layers, body.layers = body.layers, nn.ModuleList(_Call() for _ in body.layers)
        body.rotary_emb.to(self.device)
        norm, body.norm = body.norm, nn.Identity()
        try:
            with torch.no_grad():
                empty = torch.zeros(num_sequences, length, self.hidden_size, device=self.device, dtype=self.dtype)
                body(inputs_embeds=empty, use_cache=False)
            return [call.options for call in body.layers]
        finally:
            body.layers, body.norm = layers, norm


class _Call(nn.Module):
    """Stands where a layer was and keeps how it is called."""

    def forward(self, hidden: Tensor, **options: Any) -> Any:
        self.options = options
        return (hidden, None) if "prev_topk_indices" in options else hidden


def open_model(
    checkpoint: Checkpoint, family: Family, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> StreamedModel:
    """A model to be run layer by layer. Raises SourceError for architectures that are not supported."""
    return StreamedModel(
        checkpoint=checkpoint,
        family=family,
        binding=bind_checkpoint(checkpoint, family),
        skeleton=build_skeleton(family.text_config(checkpoint.config)),
        device=torch.device(device),
        dtype=dtype,
    )


def begin_states(model: StreamedModel, tokens: Tokens, *, directory: Path | None = None, layer: int = 0) -> States:
    """Embedded tokens, or what lies in ``directory`` behind ``layer`` layers. Raises as ``open_states``."""
    num_sequences, length = tokens.ids_NS.shape
    states = open_states(num_sequences, length, model.hidden_size, dtype=model.dtype, directory=directory, layer=layer)
    if not layer:
        with named_memory_errors(model.embedding_weight.name):
            for first, last in states.batches(_EMBEDDED_TOKENS):
                ids_T = tokens.ids[first:last].reshape(-1)
                states.rows(states.hidden, first, last)[:] = model.embed(ids_T).view(last - first, length, -1)
    return states


def _slots(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint must hold for a module."""
    yield from module.state_dict(keep_vars=True).items()


def _fill(module: nn.Module, name: str, value: Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[leaf] = value
