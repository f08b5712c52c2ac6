"""A word that an option does not know: one sentence in every command, with the words to choose from."""

import pytest

from quantkit.errors import UsageError
from quantkit.registry import one_of
from tests.cli.inside import refusal

SERVE = ("serve-plan", "glm-5.2", "--gpu", "h200", "--tp", "8")


@pytest.mark.parametrize(
    ("command", "option", "words"),
    [
        (("convert", "glm-5.2"), "--to", "int4"),
        (("plan", "glm-5.2"), "--to", "int4"),
        (("convert", "glm-5.2"), "--engine", "sglang, vllm"),
        (("plan", "glm-5.2"), "--engine", "sglang, vllm"),
        (("relayout", "in", "out", "--format", "w4afp8"), "--engine", "sglang, vllm"),
        (("verify", "out"), "--engine", "sglang, vllm"),
        (("memory-plan", "glm-5.2"), "--engine", "sglang, vllm"),
        (SERVE, "--engine", "sglang, vllm"),
        ((*SERVE, "--prefill", "glm-5.2"), "--engine", "sglang, vllm"),
        (SERVE, "--backend", "none, deepep, mooncake, nixl, mori, pplx"),
        (("verify", "out", "--engine", "vllm"), "--backend", "none, deepep, mooncake, nixl, mori, pplx"),
        (("convert", "glm-5.2"), "--executor", "local, ray"),
        (("calibrate", "in", "--text", "t", "-o", "s"), "--dtype", "float32, bfloat16"),
        (("evaluate", "in", "out", "--text", "t"), "--dtype", "float32, bfloat16"),
        (("kv-scales", "in"), "--method", "absmax, percentile, mse, unit"),
        (("kv-scales", "in"), "--per", "tensor, head"),
        (("kv-scales", "in"), "--format", "compressed-tensors, modelopt, sglang"),
        (("kv-scales", "in"), "--write-to", "sidecar, checkpoint"),
    ],
)
def test_a_word_that_is_not_known(command, option, words):
    error = refusal(*command, option, "odd")
    assert (error.message, error.remedy) == (f"{option} odd is not known", f"choose {words}")
    assert error.exit_code == 2


def test_one_of_gives_the_word_or_the_number():
    assert one_of("--per", "head", ("tensor", "head")) == "head"
    assert one_of("--group-size", 64, (32, 64)) == 64
    with pytest.raises(UsageError, match=r"--group-size 48 is not known; choose 32, 64"):
        one_of("--group-size", 48, (32, 64))
