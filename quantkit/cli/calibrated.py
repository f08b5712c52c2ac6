"""Methods that see inputs: their options, and the tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli import running
from quantkit.errors import UsageError

if TYPE_CHECKING:
    from quantkit.plan.plan import Plan
    from quantkit.sources import ResolvedSource
    from quantkit.streaming import Tokens

StreamingOption = Annotated[
    bool, typer.Option("--streaming", help="GPTQ here, with one layer in memory, and not by llm-compressor.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the command line says of what a method sees."""

    tokens: running.TokenOptions
    streaming: bool

    def check(self, method: str, *, is_alone: bool, is_limited: bool, is_dry: bool) -> None:
        """Raise UsageError for options that do not go with the method, or with each other.

        ``is_alone``: one process does all of the work. ``is_dry``: it is only planned, and no input is needed.
        """
        is_given = self.tokens.is_given or self.streaming
        if method == "search":
            if is_given:
                what = "--streaming" if self.streaming else "text or tokens"
                raise UsageError(
                    f"{what} without --method: the search sees no inputs",
                    remedy=f"add --method gptq or awq, or leave {self._named} out",
                )
            return
        if not is_alone:
            raise UsageError(
                f"--method {method} runs the model in one process",
                remedy="leave --rank, --world-size, --finalize and --executor out",
            )
        if is_limited:
            raise UsageError(
                f"--method {method} is for all layers alike", remedy="leave --limit-shards and --layers out"
            )
        if self.streaming and method != "gptq":
            raise UsageError(f"--method {method} does not run layer by layer", remedy="leave --streaming out")
        if not is_dry or is_given:
            self.tokens.check()
        if not is_dry:
            self.tokens.check_path()
            running.require_models(*(() if self.streaming else ("llmcompressor",)))

    @property
    def _named(self) -> str:
        """The options that were given, as the command line spells them."""
        tokens = self.tokens
        given: dict[str, object] = {"--streaming": self.streaming, "--text": tokens.text, "--tokens": tokens.tokens}
        given |= {"--length": tokens.length, "--sequences": tokens.sequences}
        return " and ".join(name for name, value in given.items() if value)

    def check_files(self, resolved: "ResolvedSource") -> None:
        """Raise SourceError for a text or ids that cannot be read: without the model's shards, or a tokenizer."""
        self.tokens.check_file(vocabulary=_vocabulary(resolved))

    def read(self, resolved: "ResolvedSource") -> "Tokens":
        """Raises SourceError for a text too short or ids that are none. The source is here."""
        assert resolved.repository is None
        return self.tokens.read(resolved.checkpoint.directory, vocabulary=_vocabulary(resolved))


def _vocabulary(resolved: "ResolvedSource") -> int:
    from quantkit.families.config_values import integer

    return integer(resolved.family.text_config(resolved.checkpoint.config), "vocab_size", at_least=1)


def with_inputs(resolved: "ResolvedSource", plan: "Plan", inputs: Inputs) -> "tuple[Plan, Tokens | None]":
    """The plan, whose recipe says over what it is calibrated, and the tokens; as it was where nothing is."""
    if plan.recipe.method == "search":
        return plan, None
    from quantkit.calibrated.convert import with_calibration

    tokens = inputs.read(resolved)
    return with_calibration(plan, tokens, streaming=inputs.streaming), tokens
