"""Is everything there that the config promises? Compared at the level of logical weights, whatever their storage."""

from collections.abc import Iterable, Sequence
from typing import NoReturn

from quantkit.checkpoint.source import Checkpoint
from quantkit.codecs.opaque import Opaque
from quantkit.errors import SourceError
from quantkit.families.family import ExpectedTensor, Family, Role
from quantkit.module_names import expert_of, layer_name, layer_of
from quantkit.tensors import F64
from quantkit.weights.binding import Binding
from quantkit.weights.weight import Weight


def check_complete(
    family: Family, checkpoint: Checkpoint, binding: Binding, *, allow_incomplete: bool
) -> tuple[list[str], bool]:
    """Warnings for what may be absent, and whether weights are missing by the user's leave.

    Raises SourceError for a missing weight, and as ``missing_weights`` does.
    """
    warnings, missing = missing_weights(family, checkpoint, binding)
    if missing and not allow_incomplete:
        remedy = "download the checkpoint again, or pass --allow-incomplete if it is meant to lack them"
        refuse_missing(missing, remedy=remedy)
    if missing:
        warnings.append(f"{len(missing)} weights are missing ({missing[0].name}, ...): the output will lack them too")
    return warnings, bool(missing)


def refuse_missing(missing: Sequence[ExpectedTensor], *, remedy: str) -> NoReturn:
    """Raise SourceError for weights that must be there and are not; it names the first."""
    num_more = len(missing) - 1
    more = f"and {num_more} more {'weight' if num_more == 1 else 'weights'} are" if num_more else "is"
    raise SourceError(f"config.json promises it, and it {more} missing", tensor=missing[0].name, remedy=remedy)


def missing_weights(family: Family, checkpoint: Checkpoint, binding: Binding) -> tuple[list[str], list[ExpectedTensor]]:
    """Warnings for what may be absent, and what must not be and is.

    Raises SourceError for a shape that the config contradicts, and for what it does not count.
    A model saved without its MTP layer is whole: that is a warning. Half an MTP layer is not.
    """
    if not family.is_known:
        return [], []
    root = text_root(binding)
    expected = list(family.expected_tensors(checkpoint.config, root=root))
    for tensor in expected:
        weight = binding.weights.get(tensor.name)
        if weight is not None and weight.shape != tensor.shape:
            raise SourceError(
                f"has shape {list(weight.shape)}, but config.json makes it {list(tensor.shape)}",
                tensor=weight.stored.name,
                file=weight.stored.path.name,
                remedy="the config and the shards belong to different checkpoints; download both again",
            )
        if weight is not None and type(weight.codec) is Opaque and weight.stored.spec.dtype != F64:
            raise SourceError(
                f"is {weight.stored.spec}, and a weight is made of floats",
                tensor=weight.stored.name,
                file=weight.stored.path.name,
                remedy="download this shard again",
            )
    _check_surplus(family, checkpoint, binding, root)
    missing = [tensor for tensor in expected if not tensor.optional and tensor.name not in binding.weights]
    first_mtp = family.num_layers(checkpoint.config)
    mtp_layers = range(first_mtp, first_mtp + family.num_mtp_layers(checkpoint.config))
    prefixes = tuple(f"{layer_name(root, layer)}." for layer in mtp_layers)
    has_mtp = any(name.startswith(prefixes) for name in binding.weights) if prefixes else False
    warnings = []
    if prefixes and not has_mtp:
        missing = [tensor for tensor in missing if not tensor.name.startswith(prefixes)]
        warnings.append(
            "config.json promises an MTP layer and the checkpoint has none: no speculative decoding with it"
        )
    return warnings, missing


def surplus_weights(family: Family, checkpoint: Checkpoint, binding: Binding) -> list[Weight]:
    """What a known family's config does not stand for; a vision part is not counted so closely."""
    if not family.is_known:
        return []
    names = {tensor.name for tensor in family.expected_tensors(checkpoint.config, root=text_root(binding))}
    beyond = (weight for name, weight in binding.weights.items() if name not in names)
    return [weight for weight in beyond if family.role_of(weight.name) is not Role.VISION]


def _check_surplus(family: Family, checkpoint: Checkpoint, binding: Binding, root: str) -> None:
    """A layer or an expert that the config does not count would be carried along unseen, and never loaded."""
    num_layers = family.num_layers(checkpoint.config) + family.num_mtp_layers(checkpoint.config)
    num_experts = family.num_experts(checkpoint.config)
    for name, weight in binding.weights.items():
        layer = layer_of(name)
        if layer is None or layer.root != root:
            continue
        expert = expert_of(layer.rest)
        number = None if expert is None else expert.number
        if layer.number >= num_layers or (number is not None and number >= num_experts):
            raise SourceError(
                f"lies beyond the {num_layers} layers of {num_experts} experts that config.json counts",
                tensor=weight.stored.name,
                file=weight.stored.path.name,
                remedy="the config and the shards belong to different checkpoints; download both again",
            )


def text_root(binding: Binding) -> str:
    """What stands before ``layers.`` in the text model: ``model.``, ``language_model.model.``, ..."""
    return root_of_names(binding.weights)


def root_of_names(names: Iterable[str]) -> str:
    """The same of the names of weights or of stored tensors."""
    listed = list(names)
    for name in listed:
        if name.endswith("embed_tokens.weight") and layer_of(name) is None:
            return name.removesuffix("embed_tokens.weight")
    for name in listed:
        layer = layer_of(name)
        if layer is not None and layer.number == 0 and layer.root.endswith("model."):
            return layer.root
    return "model."
