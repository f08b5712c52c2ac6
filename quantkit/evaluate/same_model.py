"""Are two checkpoints forms of one model? Otherwise every figure would be of something else."""

from quantkit.errors import SourceError
from quantkit.statistics.fingerprint import Fingerprint
from quantkit.streaming import StreamedModel
from quantkit.weights.identity import model_fingerprint

_REMEDY = "give the checkpoint that the output was made from"
_OTHER_REMEDY = (
    f"{_REMEDY}, or --allow-other-model for what was trained further, or a tool that moves scales into norms"
)


def check_same_model(source: StreamedModel, output: StreamedModel, *, allow_other: bool) -> None:
    """Raises SourceError, exit code 3, where they are not. ``allow_other``: weights may differ, sizes never."""
    where = output.checkpoint.directory
    for what, one, other in (
        ("layers", source.num_layers, output.num_layers),
        ("channels of hidden states", source.hidden_size, output.hidden_size),
        ("tokens in its vocabulary", source.vocabulary, output.vocabulary),
    ):
        if one != other:
            raise SourceError(f"has {other:,} {what}, the source has {one:,}", file=where, remedy=_REMEDY)
    difference = None if allow_other else _fingerprint(source).difference(_fingerprint(output))
    if difference is not None:
        raise SourceError(f"is another model than the source: {difference} differ", file=where, remedy=_OTHER_REMEDY)


def _fingerprint(model: StreamedModel) -> Fingerprint:
    return model_fingerprint(model.binding, model.family, model.checkpoint.config)
