"""A conversion that is calibrated first: over what, goes into the recipe; the words it has chosen, into the output."""

from dataclasses import replace

from quantkit.calibrated.few_tokens import few_tokens
from quantkit.calibrated.make import WordsRequest, made_words
from quantkit.calibrated.needs import words_directory
from quantkit.convert.conversion import Conversion
from quantkit.convert.convert import ConvertReport, convert_checkpoint
from quantkit.plan.plan import Plan
from quantkit.recipe import Calibration
from quantkit.streaming import Tokens


def with_calibration(plan: Plan, tokens: Tokens, *, streaming: bool) -> Plan:
    """The plan, whose recipe says over what it is calibrated."""
    sequences, length = tokens.ids_NS.shape
    seen = Calibration(tokens=tokens.sha256, sequences=sequences, length=length, streaming=streaming)
    changes: dict[str, object] = {"calibration": seen}
    if plan.recipe.method == "gptq" and not streaming:
        changes["signed_scales"] = False  # llm-compressor's are positive
    return replace(plan, recipe=plan.recipe.model_copy(update=changes))


def convert_calibrated(conversion: Conversion, tokens: Tokens) -> ConvertReport:
    """Calibrate, then convert. What calibration has chosen stays beside the output until that is in place.

    Raises as ``made_words`` and ``convert_checkpoint`` do.
    """
    with made_words(WordsRequest(conversion=conversion, tokens=tokens)) as words:
        report = convert_checkpoint(replace(conversion, words=words))
        warnings = few_tokens(conversion.plan, tokens.ids_NS.size, words_directory(conversion.target))
    return replace(report, plan=replace(report.plan, warnings=(*report.plan.warnings, *warnings)))
