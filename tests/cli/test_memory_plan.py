"""`memory-plan` as a user meets it: the forms of its question, their figures, documents and exit codes.

Most run in this process, on recipes whose tensors are listed once; what only a process of its own can show has one.
"""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

import jsonschema
import pytest
from jsonschema.exceptions import best_match

import quantkit.cli
from quantkit.cli import memory_request
from quantkit.cli.app import main
from quantkit.engines.parallel import ENGINE_VERSIONS, ENGINES
from quantkit.memory import resolve
from quantkit.memory.kv_format import KvDtype, KvLayout
from quantkit.memory.plan import Verdict
from quantkit.memory.scheme import FORMATS
from quantkit.memory.serving import MemoryRequest
from quantkit.memory.weights import Part
from quantkit.recipe_files import recipe_config, recipe_paths
from tests.tiny import tiny_config

SCHEMAS = Path(quantkit.cli.__file__).parent / "schemas"
OPTIONS = Path(__file__).parent.parent / "golden" / "options.json"
SCHEMA = json.loads((SCHEMAS / "memory-plan.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
# 8 heads in BF16: may be split over 8 GPUs
SPLITTABLE = {
    "source_format": "bf16",
    "config_changes": {"num_attention_heads": 8, "num_key_value_heads": 8},
}
TOO_MUCH = "--kv-dtype fp8 --context 131072 --concurrency 64"
TOO_FEW = (
    "64 x 131,072 = 8,388,608 tokens are asked for on every rank, the pool holds 655,680: "
    "7,732,928 (388.47 GiB) too few"
)

# SGLang 0.5.23 and vLLM 0.33.0: only what a check reads
SGLANG_LOG = """\
[2026-10-02 09:00:01] server_args={'model_path': 'zai-org/GLM-5.2-FP8', 'context_length': 65536, \
'mem_fraction_static': 0.85, 'max_running_requests': 48, 'tp_size': 16, 'pp_size': 1, 'dp_size': 1, \
'attn_dp_size': 1, 'dcp_size': 1, 'ep_size': 1, 'kv_cache_dtype': 'fp8_e4m3'}
[2026-10-02 09:00:20 TP0] Load weight begin. avail mem=137.40 GB
[2026-10-02 09:02:20 TP0] Load weight end. elapsed=120.11 s, type=GlmMoeDsaForCausalLM, quant=fp8, \
avail mem=91.64 GB, mem usage=45.76 GB.
[2026-10-02 09:02:42 TP0] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 1400064, KV size: 70.33 GB
[2026-10-02 09:03:08 TP0] max_total_num_tokens=1400064, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=48, context_len=65536, available_gpu_mem=14.03 GB
"""
VLLM_LOG = """\
(APIServer pid=11) INFO 10-02 09:00:01 [startup.py:96] non-default args: {'model': 'zai-org/GLM-5.2-FP8', \
'max_model_len': 65536, 'tensor_parallel_size': 8, 'enable_expert_parallel': True, 'gpu_memory_utilization': 0.9}
(EngineCore pid=22) INFO 10-02 09:00:09 [core.py:139] Initializing a V1 LLM engine (v0.33.0) with config: \
model='zai-org/GLM-5.2-FP8', dtype=torch.bfloat16, max_seq_len=65536, tensor_parallel_size=8, \
pipeline_parallel_size=1, data_parallel_size=1, decode_context_parallel_size=1, quantization=fp8, kv_cache_dtype=fp8
(Worker_TP0_EP0 pid=33) INFO 10-02 09:02:30 [model_runner.py:428] Model loading took 88.85 GiB memory and 118.2 seconds
(Worker_TP0_EP0 pid=33) INFO 10-02 09:02:50 [gpu_worker.py:772] Available KV cache memory: 30.00 GiB
(EngineCore pid=22) INFO 10-02 09:02:51 [kv_cache_utils.py:1147] GPU KV cache size: 597,120 tokens, \
Maximum concurrency for 65,536 tokens per request: 9.11x
(Worker_TP0_EP0 pid=33) INFO 10-02 09:03:20 [model_runner.py:1163] Graph capturing finished in 25 secs, took 2.38 GiB
"""


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    def cells(self, label):
        """The other cells of the row of a table."""
        rows = [re.split(r"\s{2,}", line.strip()) for line in self.out.splitlines()]
        return next(cells[1:] for cells in rows if cells[0] == label)

    def document(self, schema="memory-plan"):
        """The one JSON document on stdout, valid against its schema."""
        parsed = json.loads(self.out)
        validator = jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{schema}.json").read_text()))
        error = best_match(validator.iter_errors(parsed))
        assert error is None, f"{error.json_path}: {error.message[:200]}"
        return parsed


read_once = cache(resolve.recipe_model)


def run(*lines):
    """`quantkit memory-plan` in this process, its arguments in one line or several."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(resolve, "recipe_model", read_once)
        patch.setattr(memory_request, "recipe_model", read_once)
        patch.setattr(signal, "signal", lambda number, handler: None)  # its handlers would outlive the command
        patch.setattr(sys, "argv", ["quantkit", "memory-plan", *shlex.split(" ".join(lines))])
        with pytest.raises(SystemExit) as ended:
            main()
    return Result(ended.value.code or 0, out.getvalue(), err.getvalue())


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty directory, which commands are run in."""
    directory = tmp_path / "here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def process(line, cwd=None, first="", **environment):
    """The same in a process of its own, ``first`` executed before it."""
    code = f"{first}\nfrom quantkit.cli.app import main; main()"
    command = [sys.executable, "-c", code, "memory-plan", *shlex.split(line)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)
    return Result(result.returncode, result.stdout, result.stderr)


def write_config(directory, config):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return directory


def test_a_recipe_as_int4_and_again_the_same(tmp_path):
    results = []
    for seed in ("0", "1"):
        (tmp_path / seed).mkdir()
        line = "glm-5.2 --to int4 --tp 8 --gpu h200 --html page.html"
        results.append(process(line, cwd=tmp_path / seed, PYTHONHASHSEED=seed))
    first, second = results
    assert first == second
    assert (tmp_path / "0" / "page.html").read_bytes() == (tmp_path / "1" / "page.html").read_bytes()
    assert (first.code, first.err) == (0, "")
    assert first.out.startswith(
        "Memory plan: glm-5.2, INT4 experts in groups of 32, rest BF16\n"
        "sglang 0.5.23, 8 x H200 141GB (139.8 GiB each)\nFlags: --tp-size 8\n"
    )
    assert first.cells("all") == ["51.43", "2.93", "54.36"]
    assert first.cells("weights")[0] == "54.36 GiB"
    assert "Verdict: tight\n" in first.out


@pytest.mark.parametrize(
    ("options", "gib", "scheme"),
    [
        ("", "88.18", "FP8"),
        ("--to fp8", "88.18", "FP8"),
        ("--to int4", "54.36", "INT4 experts in groups of 32, rest BF16"),
        ("--scheme int4 --group-size 64", "51.72", "INT4 experts in groups of 64, rest BF16"),
        ("--to int4 --rest fp8", "51.67", "INT4 experts in groups of 32, rest FP8"),
        ("--to int4 --rest fp8-native", "51.26", "INT4 experts in groups of 32, rest native FP8"),
        ("--to bf16", "175.65", "BF16"),
    ],
)
def test_weights_by_scheme(options, gib, scheme):
    result = run("glm-5.2", options, "--allow-overcommit")
    assert result.code == 0
    assert result.cells("all")[2] == gib
    assert f"Memory plan: glm-5.2, {scheme}\n" in result.out


def test_a_token_of_fp8_kv():
    result = run("glm-5.2 --kv-dtype fp8")
    assert result.cells("KV a token") == [
        "53,940 B",
        "78 layers x 656 B + 21 index layers x 132 B = 53,940 B",
    ]
    assert result.cells("KV tokens")[0] == "655,680"
    raw = run("glm-5.2 --kv-dtype fp8 --kv-layout raw")
    assert raw.cells("KV a token")[0] == "47,700 B"


def test_both_names_of_mtp_are_one():
    first, second, without = (run("glm-5.2", option) for option in ("--with-mtp", "--mtp", ""))
    assert first == second
    assert first.out.startswith("Memory plan: glm-5.2, FP8, with MTP\n")
    assert first.cells("mtp")[2] == "1.31"
    assert "\n  mtp" not in without.out


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("--kv-dtype BFloat16", "--kv-dtype bf16"),
        ("--kv-dtype half", "--kv-dtype bf16"),
        ("--kv-dtype auto", ""),
        ("--kv-dtype fp8_e5m2", "--kv-dtype fp8"),
        ("--kv-dtype float8_e4m3fn", "--kv-dtype fp8"),
        (
            "--engine vllm --gpu b200 --kv-dtype fp8_ds_mla",
            "--engine vllm --gpu b200 --kv-dtype fp8 --kv-layout packed",
        ),
    ],
)
def test_kv_dtypes_by_the_words_of_engines_and_of_torch(words, same):
    assert run(f"glm-5.2 --context 4096 {words}") == run(f"glm-5.2 --context 4096 {same}")


def test_words_of_the_engines_and_capitals_are_understood():
    assert run("glm-5.2 --engine SGLang --gpu H200 --to INT4 --kv-dtype fp8_e4m3 --kv-layout Packed --role Both") == (
        run("glm-5.2 --to int4 --kv-dtype fp8 --kv-layout packed")
    )


def test_options_reach_the_plan():
    options = "--tp 16 --ep 4 --pp 2 --dp-attention 2 --dcp 2 --gpu b200 --gpu-gib 170.5"
    options += " --mem-fraction-static 0.8 --kv-dtype bf16 --enforce-eager --context 8192 --concurrency 6"
    plan = run("glm-5.2", options, "--json").document()
    assert plan["parallel"] == {
        "tp": 16,
        "ep": 4,
        "pp": 2,
        "dp_attention": 2,
        "dcp": 2,
        "gpus": 32,
        "flags": "--tp-size 16 --pp-size 2 --ep-size 4 --attn-dp-size 2 --dcp-size 2",
    }
    assert plan["gpu"]["name"] == "b200"
    assert (plan["gpu"]["total_gib"], plan["gpu"]["free_before_load_gib"]) == (170.5, 168.1)
    assert (plan["role"], plan["kv"]["dtype"]) == ("both", "bf16")
    assert plan["demand"] == {"context": 8192, "concurrency": 6, "per_replica": 3, "tokens": 24_576}
    assert (plan["budget"]["fraction"], plan["budget"]["is_default_fraction"]) == (0.8, False)
    assert [(rank["rank"], rank["stage"], rank["layers"]) for rank in plan["ranks"]] == [
        (number, number // 16, [[0, 39], [39, 78]][number // 16]) for number in range(32)
    ]
    assert sum(rank["kv_bytes_per_token"] for rank in plan["ranks"][::16]) == 78 * 1152 / 2 + 21 * 132
    tokens = [rank["kv_tokens"] for rank in plan["ranks"]]
    assert [rank["requests_at_context"] for rank in plan["ranks"]] == [number // 8192 for number in tokens]
    assert len(set(tokens)) == 2
    assert (plan["kv_tokens"], plan["requests_at_context"]) == (min(tokens), min(tokens) // 8192 * 2)

    # the two that do not go together
    refused = run("glm-5.2", options, "--role decode --json")
    assert (refused.code, refused.document("error")["error"]["remedy"]) == (2, "leave --dcp or --role out")
    alone = run("glm-5.2", options.replace("--dcp 2", "--role decode"), "--json").document()
    assert (alone["role"], alone["parallel"]["dcp"], alone["demand"]) == ("decode", 1, plan["demand"])

    more, fewer = (run(f"glm-5.2 --max-running-requests {most} --json").document() for most in (3000, 100))
    for plan, table_gib in ((more, 11.72), (fewer, 0.39)):
        assert f"= {table_gib} GiB; " in plan["ranks"][0]["overhead_source"]
    assert more["ranks"][0]["overhead_gib"] - fewer["ranks"][0]["overhead_gib"] > 11

    options = "--engine vllm --gpu-memory-utilization 0.85 --context 8192 --kv-dtype fp8"
    eager, graphs = (run("glm-5.2", options, more, "--json").document() for more in ("--enforce-eager", ""))
    assert (eager["engine"], eager["budget"]["fraction_option"]) == ("vllm", "--gpu-memory-utilization")
    assert (eager["engine_version"], eager["budget"]["fraction"]) == (ENGINE_VERSIONS["vllm"], 0.85)
    assert eager["ranks"][0]["overhead_gib"] < graphs["ranks"][0]["overhead_gib"]


def test_what_does_not_fit_is_code_5_and_a_note(here):
    write_config(here / "DIR", recipe_config("glm-5.2"))
    line = f"./DIR --tp 8 --gpu h200 --engine sglang {TOO_MUCH}"
    refused, allowed = run(line), run(line, "--allow-overcommit")
    assert (refused.code, allowed.code) == (5, 0)
    assert refused.out == allowed.out
    assert refused.err == allowed.err == f"does not fit: FP8: {TOO_FEW}\n"
    assert f"Verdict: does not fit\n  {TOO_FEW}\n" in refused.out
    assert run(line, "--concurrency 5").code == 0


@pytest.mark.parametrize(
    ("given", "planned"),
    [
        ("", 1_048_576),
        ("--context-at-most 32k", 32_768),
        ("--context-at-most 2000k", 1_048_576),
        ("--context 8k", 8192),
    ],
)
def test_a_context_at_most_is_the_models_or_less(given, planned):
    document = run(f"glm-5.2 --to int4 --engine vllm --allow-overcommit {given} --json").document()
    assert document["demand"]["context"] == planned


def test_code_5_still_prints_one_document():
    result = process(f"glm-5.2 {TOO_MUCH} --json")
    assert result.code == 5
    plan = result.document()
    assert (plan["status"], plan["verdict"], plan["reasons"]) == ("failed", "does not fit", [TOO_FEW])
    assert result.err == f"does not fit: FP8: {TOO_FEW}\n"


def test_overcommit_that_is_allowed_is_no_failure_in_the_document():
    plan = run("glm-5.2 --json --allow-overcommit", TOO_MUCH).document()
    assert (plan["status"], plan["verdict"]) == ("ok", "does not fit")


def test_without_a_model_the_checkpoint_here_is_planned(here, tiny_checkpoint, monkeypatch):
    monkeypatch.chdir(tiny_checkpoint(**SPLITTABLE).directory)
    result = run("--tp 8")
    assert result.code == 0
    assert result.out.startswith("Memory plan: source, BF16\n")
    assert "weights: headers of 2 shards in source\n" in result.out

    monkeypatch.chdir(write_config(here / "glm", recipe_config("glm-5.2")))
    result = run("--tp 8")
    assert result.code == 0
    assert result.out.startswith("Memory plan: glm, FP8\n")
    assert "weights: config.json taken at its word (headers would be counted)\n" in result.out
    assert result.cells("all")[2] == "88.18"


@pytest.mark.usefixtures("here")
def test_without_a_model_every_recipe_is_planned():
    result = run("--tp 8")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(
        "Every recipe on 8 x H200 141GB, sglang, --tp-size 8; weights in GiB and tokens a rank, nothing asked for, "
        "contexts as the models allow\n\nRecipes\n"
    )
    rows = {name: result.cells(name) for name in recipe_paths()}
    assert len(rows) == 12
    assert rows["glm-5.2"] == ["FP8", "88.18", "381,824", "tight", "54.36", "773,888", "tight", "bf16", "92,628 B"]
    assert rows["glm-4.7"] == ["BF16", "82.26", "913,756", "fits", "26.04", "2,195,341", "fits", "bf16", "47,104 B"]
    assert rows["kimi-k2.5"] == ["INT4", "71.59", "589,591", "fits", "71.59", "589,591", "fits", "bf16", "70,272 B"]

    rows = run("--tp 8 --json").document()["recipes"]
    assert [row["recipe"] for row in rows] == list(recipe_paths())
    assert {row["problem"] for row in rows} == {""}
    published, int4 = next((row["published"], row["int4"]) for row in rows if row["recipe"] == "glm-5.2")
    assert [len(published["ranks"]), published["scheme"], int4["ranks"][7]["kv_tokens"]] == [8, "FP8", 773_888]


@pytest.mark.usefixtures("here")
def test_a_recipe_that_cannot_be_served_so_says_why_in_the_overview():
    result = run("--tp 32 --json")
    assert result.code == 0
    rows = {row["recipe"]: row for row in result.document()["recipes"]}
    assert rows["glm-5.2"]["published"] is None
    assert "2048 / 32 = 64 columns per rank, not whole FP8 blocks of 128" in rows["glm-5.2"]["problem"]
    assert rows["glm-5.2"]["int4"]["verdict"] == "fits"
    assert (rows["kimi-k2.5"]["published"]["scheme"], rows["kimi-k2.5"]["problem"]) == (
        "INT4 experts in groups of 32, rest BF16",
        "",
    )
    plain = run("--tp 32")
    assert plain.cells("glm-5.2") == ["-", "-", "-", "-", "15.79", "1,189,824", "fits", "bf16", "92,628 B"]
    assert f"not planned: {rows['glm-5.2']['problem']}\n" in plain.err


def test_comparison():
    result = run("glm-5.2 --compare fp8,int4 --tp 8 --kv-dtype fp8")
    assert (result.code, result.err) == (0, "")
    assert result.cells("all weights") == ["GiB", "88.18", "54.36", "-33.82"]
    assert result.cells("experts") == ["GiB", "84.40", "47.46", "-36.93"]
    assert result.cells("KV a token") == ["B", "53,940", "53,940", "+0"]
    assert result.cells("KV tokens") == ["tokens", "655,680", "1,328,960", "+673,280"]
    assert result.cells("requests of 1,048,576 tokens") == ["requests", "0", "1", "+1"]
    assert result.cells("KV dtype") == ["fp8, packed", "fp8, packed"]
    assert result.cells("verdict") == ["tight", "tight"]

    turned = run("glm-5.2 --compare 'int4, fp8' --kv-dtype fp8 --json").document()
    assert [plan["scheme"] for plan in turned["plans"]] == ["INT4 experts in groups of 32, rest BF16", "FP8"]
    first, second = (plan["ranks"][0] for plan in turned["plans"])
    assert turned["difference"]["kv_tokens"] == second["kv_tokens"] - first["kv_tokens"] == -673_280
    assert turned["difference"] == {
        key: pytest.approx(second[key] - first[key], abs=1e-4) for key in SCHEMA["$defs"]["difference"]["properties"]
    }
    by_default = run("glm-5.2 --compare fp8,int4 --tp 8")
    assert by_default.cells("KV tokens") == ["tokens", "381,824", "773,888", "+392,064"]


def test_a_comparison_fails_where_one_of_the_two_does_not_fit():
    line = "glm-5.2 --compare fp8,int4 --kv-dtype fp8 --context 131072 --concurrency 8 --json"
    result = run(line)
    assert result.code == 5
    document = result.document()
    assert [document["status"], *(plan["status"] for plan in document["plans"])] == ["failed", "failed", "ok"]
    assert [line.split(": ")[:2] for line in result.err.splitlines()] == [["does not fit", "FP8"]]
    document = run(line, "--allow-overcommit").document()
    assert [document["status"], *(plan["status"] for plan in document["plans"])] == ["ok", "ok", "ok"]


def test_a_comparison_is_of_the_ranks_with_the_fewest_tokens():
    line = "glm-5.2 --compare fp8,int4 --pp 2"
    text, document = run(line), run(line, "--json").document()
    least = [min(plan["ranks"], key=lambda rank: rank["kv_tokens"]) for plan in document["plans"]]
    assert [rank["stage"] for rank in least] == [1, 1]
    for name, key in (("all weights", "weights_gib"), ("KV pool", "kv_pool_gib")):
        assert text.cells(name)[1:3] == [f"{rank[key]:.2f}" for rank in least]
        assert document["difference"][key] == pytest.approx(least[1][key] - least[0][key], abs=1e-4)
    assert text.cells("KV tokens")[1:3] == [f"{rank['kv_tokens']:,}" for rank in least]
    assert text.cells("KV a token")[1] == f"{least[0]['kv_bytes_per_token']:,}"


def test_check_takes_the_flags_of_an_sglang_log(here):
    (here / "server.log").write_text(SGLANG_LOG)
    result = run("glm-5.2 --check server.log")
    assert (result.code, result.err) == (0, "")
    assert "sglang 0.5.23, 16 x H200" in result.out
    assert "--mem-fraction-static, as logged: " in result.out
    assert result.cells("fraction")[0] == "0.850"
    assert result.cells("KV dtype")[0] == "fp8"
    assert "of 65,536 tokens at once" in result.out
    assert result.out.partition("Against the log of zai-org/GLM-5.2-FP8\n")[2] == (
        """\
  figure               unit      planned   measured  difference  line
  weights and copies   GiB        45.014     45.760  -1.63%         3
  free before loading  GiB       137.400    137.400  +0.00%         2
  free after loading   GiB        92.036     91.640  +0.43%         3
  KV pool              GiB        71.426     70.330  +1.56%         4
  KV tokens            tokens  1,421,824  1,400,064  +1.55%         4
  fraction                         0.850      0.850  +0.00%         1
  KV bytes per token   B          53,940     53,938  +0.00%         4

"""
    )


def test_check_takes_the_flags_of_a_vllm_log(here):
    (here / "server.log").write_text(VLLM_LOG)
    plan = run("glm-5.2 --check server.log --json").document()
    assert (plan["engine"], plan["parallel"]["tp"], plan["parallel"]["ep"]) == ("vllm", 8, 8)
    assert (plan["budget"]["fraction"], plan["demand"]["context"]) == (0.9, 65_536)
    assert (plan["kv"]["dtype"], plan["kv"]["layout"]) == ("fp8", "packed")
    checked = {row["name"]: row for row in plan["check"]}
    assert list(checked) == [
        "weights and copies",
        "KV pool",
        "KV tokens",
        "fraction",
        "CUDA graphs",
        "KV bytes per token",
    ]
    assert checked["CUDA graphs"] == {
        "name": "CUDA graphs",
        "unit": "GiB",
        "planned": None,
        "measured": 2.38,
        "line": 6,
        "difference_percent": None,
    }
    tokens = checked["KV tokens"]
    assert (tokens["planned"], tokens["measured"], tokens["line"]) == (plan["ranks"][0]["kv_tokens"], 597_120, 5)
    assert tokens["difference_percent"] == pytest.approx((tokens["planned"] / 597_120 - 1) * 100, abs=0.005)
    plain = run("glm-5.2 --check server.log")
    assert plain.cells("CUDA graphs") == ["GiB", "-", "2.380", "-", "6"]


def test_options_that_are_given_go_before_the_log(here):
    (here / "server.log").write_text(SGLANG_LOG)
    line = "glm-5.2 --tp 8 --mem-fraction-static 0.9 --context 4096 --kv-dtype bf16 --max-running-requests 48 --json"
    checked = run(line, "--check server.log").document()
    plain = run(line).document()
    check = checked.pop("check")
    assert checked.pop("log_model") == "zai-org/GLM-5.2-FP8"
    assert checked.pop("doubts") != []
    assert checked == plain
    assert [(row["name"], row["measured"]) for row in check if row["name"] in ("fraction", "KV tokens")] == [
        ("KV tokens", 1_400_064),
        ("fraction", 0.85),
    ]


def test_a_log_of_another_server_is_doubted(here):
    (here / "server.log").write_text(SGLANG_LOG)
    result = run("glm-5.2 --to int4 --check server.log")
    assert result.code == 0
    assert result.err.startswith("doubt: weights and copies: planned 28.7")
    assert result.err.count("\n") == 1
    as_json = run("glm-5.2 --to int4 --check server.log --json")
    assert [f"doubt: {doubt}\n" for doubt in as_json.document()["doubts"]] == [result.err]


def test_a_checked_plan_that_does_not_fit_is_code_5(here):
    (here / "server.log").write_text(SGLANG_LOG)
    result = run("glm-5.2 --check server.log --concurrency 64 --json")
    assert result.code == 5
    assert result.document()["status"] == "failed"
    assert result.document()["check"]


@pytest.mark.parametrize(
    ("options", "code", "heading"),
    [
        ("--kv-dtype fp8", 0, "glm-5.2 on 8 x H200 141GB"),
        (TOO_MUCH, 5, "glm-5.2 on 8 x H200 141GB"),
        ("--compare fp8,int4", 0, "glm-5.2: 2 plans compared"),
        ("--check server.log", 0, "glm-5.2 on 16 x H200 141GB"),
    ],
    ids=["plan", "does not fit", "comparison", "check"],
)
def test_html_is_written_beside_what_is_printed(options, code, heading, here):
    (here / "server.log").write_text(SGLANG_LOG)
    plain = run("glm-5.2 --json", options)
    assert run("glm-5.2 --json --html page.html", options) == plain
    assert plain.code == code
    page = (here / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>\n")
    assert f"<title>Memory plan of {heading}</title>" in page
    parsed = plain.document()
    for plan in parsed.get("plans", [parsed]):
        assert f'<span class="unseen">Verdict: </span>{plan["verdict"]}</p>' in page


def test_a_page_in_a_directory_that_is_not_there_is_refused(here):
    result = run("glm-5.2 --html none/page.html")
    assert (result.code, result.out) == (2, "")
    assert result.err == "quantkit: --html none/page.html lies in no directory that is there; make the directory\n"
    assert list(here.iterdir()) == []


def test_a_page_goes_over_an_older_one(here):
    assert run("glm-5.2 --html page.html").code == 0
    older = (here / "page.html").read_text()
    assert run("glm-5.1 --html page.html").code == 0
    assert (here / "page.html").read_text() != older
    assert [path.name for path in here.iterdir()] == ["page.html"]


def test_a_page_of_a_demand_without_measure_stays_small(here):
    assert run("glm-5.2 --context 1000000 --concurrency 1000000000 --html page.html").code == 5
    assert (here / "page.html").stat().st_size < 1 << 17


def test_a_default_fraction_below_zero_does_not_fit(here):
    result = run("glm-5.2 --to bf16 --gpu-gib 8 --tp 64 --json")
    assert result.code == 5
    assert result.document()["budget"]["fraction"] < 0


LEGAL = "legal, all else equal: --tp "
BAD = [
    # a name that is not known, and what is near it
    ("glm-5.2 --gpu h2000", 2, ["unknown GPU 'h2000'", "did you mean h200 or ", "--gpu-gib"]),
    ("glm-5.2 --gpu quantum", 2, ["unknown GPU 'quantum'", "known: h100, h200, h20, "]),
    ("glm-5.x", 2, ["'glm-5.x' is neither a recipe nor a directory here", "did you mean glm-5."]),
    ("zzz", 2, ["'zzz' is neither", "see quantkit recipes"]),
    ("./nowhere", 3, ["./nowhere: is not there", "name a recipe, a config.json, a directory or a hub id"]),
    ("nowhere.json", 3, ["nowhere.json: is missing", "name a config.json, "]),
    # words
    ("glm-5.2 --scheme int5", 2, ["--scheme int5 is not known", "choose fp8, bf16, int4"]),
    ("glm-5.2 --engine tgi", 2, ["--engine tgi is not known", "choose sglang, vllm"]),
    ("glm-5.2 --role encode", 2, ["--role encode is not known", "choose both, prefill, decode"]),
    ("glm-5.2 --kv-dtype int8", 2, ["--kv-dtype int8 is not known", "choose bf16, fp8"]),
    ("glm-5.2 --kv-dtype fp8_per_token_head", 2, ["--kv-dtype fp8_per_token_head is not known", "choose bf16, fp8"]),
    (
        "glm-5.2 --kv-dtype fp8_ds_mla --kv-layout raw",
        2,
        ["has packed rows, --kv-layout says raw", "leave --kv-layout"],
    ),
    ("glm-4.7 --kv-dtype fp8_ds_mla", 2, ["sparse attention", "give --kv-dtype fp8 for fp8_ds_mla"]),
    ("glm-5.2 --to bfloat16", 2, ["--scheme bfloat16 is not known", "choose fp8, bf16, int4"]),
    ("glm-5.2 --kv-layout odd", 2, ["--kv-layout odd is not known", "choose raw, packed"]),
    ("glm-5.2 --to int4 --rest int4", 2, ["--rest int4 is not known", "choose bf16, fp8"]),
    ("glm-5.2 --to int4 --group-size 48", 2, ["--group-size 48 is not known", "choose 32, 64, 128"]),
    ("glm-5.2 --compare fp8", 2, ["--compare 'fp8' is no pair", "give two of fp8, bf16, int4"]),
    ("glm-5.2 --compare fp8,int4,bf16", 2, ["--compare 'fp8,int4,bf16' is no pair", "give two of fp8, bf16, int4"]),
    ("glm-5.2 --compare fp8,int5", 2, ["--compare 'fp8,int5' is no pair", "give two of fp8, bf16, int4"]),
    # numbers
    ("glm-5.2 --tp 0", 2, ["--tp 0 is no size", "give one from 1 to 4096"]),
    ("glm-5.2 --dcp -2", 2, ["--dcp -2 is no size", "give one from 1 to 4096"]),
    ("glm-5.2 --context 0", 2, ["--context 0 is no count", "give a number from 1"]),
    ("glm-5.2 --concurrency -3", 2, ["--concurrency -3 is no count", "give a number from 1"]),
    ("glm-5.2 --gpu-gib -1", 2, ["--gpu-gib -1 is no memory of such a GPU", "give GiB as torch reports them"]),
    ("glm-5.2 --gpu-gib 2.4", 2, ["--gpu-gib 2.4 is no memory of such a GPU", "from 8 to 10000"]),
    ("glm-5.2 --gpu-gib nan", 2, ["--gpu-gib nan is no memory of such a GPU", "from 8 to 10000"]),
    ("glm-5.2 --tp 4096 --pp 94", 2, ["--tp 4096 and --pp 94 make 385024 GPUs", "plan for 4096 at most"]),
    ("glm-5.2 --mem-fraction-static 1.5", 2, ["--mem-fraction-static 1.5 is no share", "give 0.88"]),
    ("glm-5.2 --check server.log --mem-fraction-static 1.5", 2, ["--mem-fraction-static 1.5 is no share", "give 0.88"]),
    ("glm-5.2 --engine vllm --gpu-memory-utilization 0", 2, ["--gpu-memory-utilization 0 is no share", "give 0.88"]),
    ("glm-5.2 --tp eight", 2, ["eight", "see quantkit memory-plan --help"]),
    ("glm-5.2 --max-running-requests 0", 2, ["--max-running-requests 0 is no count", "give a number from 1"]),
    ("glm-5.2 --context 2000000", 2, ["the 1048576 tokens that the model is made for", "give less, or plan from"]),
    # what engines refuse, and the rule
    ("glm-5.2 --tp 7", 2, ["64 attention heads do not divide by 7", f"{LEGAL}1, 2, 4, 8, 16\n"]),
    (
        "glm-4.7 --to int4 --group-size 128 --tp 8",
        2,
        [
            "1536 / 8 = 192 columns per rank, not a whole number of groups of 128",
            f"{LEGAL}1, 2, 4; --ep 8; --group-size 32, 64\n",
        ],
    ),
    ("glm-5.2 --ep 3", 2, ["EP 3 does not divide TP 8", "legal, all else equal: --ep 1, 2, 4, 8\n"]),
    ("glm-4.7 --kv-dtype fp8 --kv-layout packed", 2, ["sparse attention", "leave --kv-layout out"]),
    ("glm-5.2 --kv-dtype bf16 --kv-layout packed", 2, ["is an FP8 layout", "add --kv-dtype fp8"]),
    ("glm-5.2 --engine vllm --gpu a100", 2, ["no sparse-attention backend for sm80", "choose another --gpu"]),
    # what does not go together
    ("glm-5.2 --group-size 64", 2, ["--group-size and --rest speak of INT4", "add --to int4"]),
    ("glm-5.2 --to fp8 --group-size 64", 2, ["speak of INT4, not of fp8", "leave them out"]),
    ("glm-5.2 --rest fp8", 2, ["--group-size and --rest speak of INT4", "add --to int4"]),
    ("kimi-k2.5 --to int4 --group-size 64", 2, ["kimi-k2.5 is INT4 already, in groups of 32", "or give 32"]),
    (
        "glm-5.2 --engine vllm --mem-fraction-static 0.8",
        2,
        ["--mem-fraction-static is an option of sglang", "add --engine sglang"],
    ),
    (
        "glm-5.2 --gpu-memory-utilization 0.8",
        2,
        ["--gpu-memory-utilization is an option of vllm", "add --engine vllm"],
    ),
    ("glm-5.2 --to int4 --compare fp8,int4", 2, ["--compare and --scheme say the same", "leave one of them out"]),
    ("glm-5.2 --compare fp8,int4 --check x.log", 2, ["--compare and --check do not", "leave one of them out"]),
    ("--compare fp8,int4", 2, ["there is no checkpoint here", "name a MODEL"]),
    ("--check other.log", 2, ["there is no checkpoint here", "name a MODEL"]),
    ("--to int4", 2, ["the overview shows every recipe as published and as INT4", "name a MODEL"]),
    (
        "glm-5.2 --context 8k --context-at-most 8k",
        2,
        ["--context and --context-at-most say the same", "leave one of them out"],
    ),
    ("glm-5.2 --context-at-most 0", 2, ["--context-at-most 0 is no count", "give a number from 1 to 1,000,000,000"]),
    ("glm-5.2 --concurrency 99999999999999", 2, ["--concurrency 1e+14 is no count", "1,000,000,000"]),
    ("--context-at-most 8k", 2, ["--context-at-most speaks of one model", "name a MODEL"]),
    ("kimi-k2 --with-mtp", 2, ["kimi-k2 has no MTP layer", "leave --with-mtp out"]),
    ("glm-5.2 --engine vllm --role decode", 2, ["--role is not known for vllm", "leave --role out"]),
    ("--html page.html", 2, ["there is no checkpoint here", "name a MODEL"]),
    ("glm-5", 2, ["'glm-5' is a recipe and a directory here", "write ./glm-5 for the directory"]),
    # files
    ("./unknown", 3, ["model_type 'llama' is not a known family", "plan from the checkpoint directory or the hub id"]),
    ("./broken", 3, ["config.json: is not JSON", "download it again"]),
    ("./list", 3, ["config.json: is not a JSON object", "download it again"]),
    ("./glm-5", 3, ["config.json: is missing", "name a config.json, a recipe, a directory or a hub id"]),
    ("glm-5.2 --check none.log", 3, ["none.log: cannot be read", "check that the file is there"]),
    ("glm-5.2 --check other.log", 3, ["other.log: is no log of SGLang or vLLM", "pass what the server printed"]),
    ("glm-5.2 --check early.log", 3, ["early.log: the log of sglang stops before", "wait until the server"]),
    ("glm-5.2 --check tp.log", 3, ["tp.log: with what this log says of the server: sglang cannot split", "name the"]),
    ("glm-5.2 --check zero.log", 3, ["zero.log: line 1: tp 0 is not possible", "pass the log as the server wrote it"]),
    ("glm-5.2 --html ./glm-5/config.json", 2, ["config.json is not the name of a page", "ends in .html"]),
    ("glm-5.2 --html link.html", 2, ["link.html is there and is no regular file", "give another file"]),
    ("glm-5.2 --html pipe.html", 2, ["pipe.html is there and is no regular file", "give another file"]),
    ("glm-5.2 --html notes.html", 2, ["notes.html is there and is no page of ours", "move it away, or give another"]),
    (
        "glm-5.2 --html server.log/page.html",
        2,
        ["page.html cannot be written (Not a directory)", "give --html another"],
    ),
    (f"glm-5.2 --html {'a' * 252}.html", 2, ["cannot be written (File name too long)", "give --html another"]),
    ("glm-5.2 --check server.log --engine vllm", 2, ["the log is sglang's, --engine says vllm", "leave --engine out"]),
]


@pytest.mark.parametrize(("line", "code", "words"), BAD, ids=[line for line, _, _ in BAD])
def test_a_mistake_is_one_line_with_its_remedy_and_a_document(line, code, words, here):
    (here / "glm-5").mkdir()
    write_config(here / "unknown", {**tiny_config("glm4_moe"), "model_type": "llama"})
    write_config(here / "broken", "{")
    write_config(here / "list", "[]")
    (here / "other.log").write_text("INFO: listening on port 8000\n")
    (here / "server.log").write_text(SGLANG_LOG)
    (here / "tp.log").write_text(SGLANG_LOG.replace("'tp_size': 16", "'tp_size': 7"))
    (here / "zero.log").write_text(SGLANG_LOG.replace("'tp_size': 16", "'tp_size': 0"))
    (here / "link.html").symlink_to("elsewhere")
    os.mkfifo(here / "pipe.html")
    (here / "notes.html").write_text("<!doctype html><title>notes</title>")
    (here / "early.log").write_text(SGLANG_LOG.partition("\n")[0])
    before = set(here.rglob("*"))
    result = run(line)
    assert (result.code, result.out) == (code, "")
    assert result.err.count("\n") == 1
    assert result.err.startswith("quantkit: ")
    for word in words:
        assert word in result.err
    as_json = run(line, "--json")
    assert (as_json.code, as_json.err) == (code, result.err)
    error = as_json.document("error")
    assert error["command"] == "memory-plan"
    assert error["error"]["class"] in {2: ("UsageError", "RecipeError"), 3: ("SourceError",)}[code]
    assert error["error"]["remedy"] in result.err
    assert set(here.rglob("*")) == before


@pytest.mark.parametrize(
    ("model_type", "field"),
    [
        ("glm_moe_dsa", "num_hidden_layers"),
        ("glm_moe_dsa", "num_attention_heads"),
        ("glm_moe_dsa", "hidden_size"),
        ("glm_moe_dsa", "kv_lora_rank"),
        ("glm_moe_dsa", "index_head_dim"),
        ("glm_moe_dsa", "vocab_size"),
        ("glm4_moe", "intermediate_size"),
        ("glm4_moe", "n_routed_experts"),
        ("glm4_moe", "moe_intermediate_size"),
    ],
)
def test_a_field_that_a_config_lacks_is_named(model_type, field, here):
    config = tiny_config(model_type)
    write_config(here / "whole", config)
    assert run("./whole --tp 1").code == 0
    config.pop(field)
    write_config(here / "lacking", config)
    result = run("./lacking --tp 1")
    assert (result.code, result.out) == (3, "")
    assert result.err == f"quantkit: config.json: {field} is missing; take config.json from the source again\n"


def test_a_hub_that_cannot_be_reached(tmp_path):
    result = process(
        "zai-org/GLM-5.2-FP8",
        first="import time; time.sleep = lambda seconds: None",  # it tries several times
        HF_HOME=str(tmp_path),
        HF_ENDPOINT="http://127.0.0.1:9",
        HF_HUB_OFFLINE="0",
    )
    assert (result.code, result.out) == (3, "")
    assert result.err.count("\n") == 1
    assert result.err.startswith("quantkit: zai-org/GLM-5.2-FP8@main: cannot be fetched")
    assert "check the network" in result.err


HEAVY = {"torch", "numba", "transformers", "pydantic", "huggingface_hub"}


def imported(line, cwd):
    """How it ended, with the names of all packages that were imported instead of stderr."""
    first = "import sys, atexit; atexit.register(lambda: sys.stderr.write(' '.join(sys.modules)))"
    result = process(line, cwd=cwd, first=first)
    return replace(result, err={name.partition(".")[0] for name in result.err.split()})


def test_help_imports_nothing_heavy(tmp_path):
    result = imported("--help", tmp_path)
    assert result.code == 0
    assert "Example: quantkit memory-plan" in result.out
    assert "quantkit" in result.err
    assert result.err & {*HEAVY, "numpy"} == set()


def test_a_plan_of_119_thousand_tensors_imports_nothing_heavy(tmp_path):
    glm = read_once("glm-5.2")
    assert sum(group.count for group in glm.tensors(glm.scheme)) == 118_629
    result = imported("glm-5.2 --to int4 --html page.html", tmp_path)
    assert result.code == 0
    assert result.cells("all")[2] == "54.36"
    assert "quantkit" in result.err
    assert result.err & HEAVY == set()


def test_options_are_frozen():
    """A change of the command line is a decision: change this list with it."""
    text = process("--help", COLUMNS="200").out
    found = set(re.findall(r"(?<=[ /])--?[a-z][a-z-]*", text.split("Options:")[1])) - {"--help", "-h"}
    assert sorted(found) == json.loads(OPTIONS.read_text())["memory-plan"]


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """One document of each form."""
    log = tmp_path_factory.mktemp("logs") / "server.log"
    log.write_text(SGLANG_LOG)
    lines = {
        "plan": "glm-5.2 --kv-dtype fp8",
        "vision and stages": "kimi-k2.5 --gpu b300 --pp 2 --context 4096 --concurrency 8",
        "check": f"glm-5.2 --check {log}",
        "comparison": "glm-5.2 --compare fp8,int4 --with-mtp",
    }
    return {form: run(line, "--json").document() for form, line in lines.items()}


def test_the_document_has_what_was_asked_for(documents):
    plan = documents["plan"]
    assert (plan["model"], plan["engine"], plan["verdict"]) == ("glm-5.2", "sglang", "tight")
    assert (plan["gpu"]["name"], plan["gpu"]["total_gib"], plan["parallel"]["tp"]) == ("h200", 139.8, 8)
    assert len(plan["ranks"]) == 8
    assert plan["reasons"][0].startswith("overhead is expected to take ")
    for rank in plan["ranks"]:
        assert rank["weights_gib"] == pytest.approx(88.18, abs=0.005)
        assert rank["weights_by_part_gib"]["experts"] == pytest.approx(84.40, abs=0.005)
        assert sum(rank["weights_by_part_gib"].values()) == pytest.approx(rank["weights_gib"], abs=0.001)
        assert (rank["kv_bytes_per_token"], rank["kv_tokens"]) == (53_940, 655_680)
        assert rank["kv_pool_gib"] == pytest.approx(655_680 * 53_940 / 2**30, abs=64 * 53_940 / 2**30)
        for key in ("overhead", "kv_pool", "buffers"):
            low, high = rank[f"{key}_band_gib"]
            assert low < rank[f"{key}_gib"] < high
        assert rank["kv_tokens_band"][0] < rank["kv_tokens"] < rank["kv_tokens_band"][1]
        assert rank["replicated_gib"] == pytest.approx(1.58, abs=0.005)
        assert sum(rank["replicated_by_part_gib"].values()) == pytest.approx(1.58, abs=0.005)
        assert rank["load_peak_gib"] == pytest.approx(88.45, abs=0.005)
        assert rank["free_gib"] == rank["segments"][-1]["gib"]
        assert sum(segment["gib"] for segment in rank["segments"]) == pytest.approx(139.8, abs=0.001)


def test_the_document_says_what_is_loaded_and_how_it_is_stored(documents):
    first, second = documents["comparison"]["plans"]
    assert [plan["with_mtp"] for plan in (first, second, documents["plan"])] == [True, True, False]
    assert first["storage"] == {"experts": "fp8", "rest": "fp8", "group_size": None}
    assert second["storage"] == {"experts": "int4", "rest": "bf16", "group_size": 32}


def test_every_form_is_one_form_of_the_schema(documents):
    VALIDATOR.check_schema(SCHEMA)
    forms = [jsonschema.Draft202012Validator({**form, "$defs": SCHEMA["$defs"]}) for form in SCHEMA["oneOf"]]
    for name, parsed in documents.items():
        VALIDATOR.validate(parsed)
        assert sum(form.is_valid(parsed) for form in forms) == 1, name
    nested = json.loads(json.dumps(documents["comparison"]))
    nested["plans"][0]["check"] = documents["check"]["check"]
    assert not VALIDATOR.is_valid(nested)


def objects_in(value, path=()):
    """Objects of a document with their paths; of a list only what is in its first item, the others are alike."""
    if isinstance(value, dict):
        yield path, value
        for key, inner in value.items():
            yield from objects_in(inner, (*path, key))
    elif isinstance(value, list) and value:
        yield from objects_in(value[0], (*path, 0))


@pytest.mark.parametrize("form", ["plan", "check", "comparison"])
def test_the_schema_wants_every_key_and_no_other(form, documents):
    parsed = json.loads(json.dumps(documents[form]))
    for plan in parsed.get("plans", [parsed]):
        del plan["ranks"][1:]
    found = list(objects_in(parsed))
    assert len(found) > 10
    for path, one in found:
        one["surplus"] = 1
        assert not VALIDATOR.is_valid(parsed), path
        del one["surplus"]
        is_by_part = path[-1:] in (("weights_by_part_gib",), ("replicated_by_part_gib",))
        for key in list(one):
            kept = one.pop(key)
            assert VALIDATOR.is_valid(parsed) == is_by_part, (path, key)
            one[key] = kept
    VALIDATOR.validate(parsed)


def test_every_key_of_the_schema_is_described_with_its_unit():
    keys = []
    for path, one in objects_in(SCHEMA):
        if path[-1:] != ("properties",) or path[1] in ("plain_plan", "by_part"):
            continue
        for key, schema in one.items():
            keys.append(key)
            target = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
            words = schema.get("description") or target.get("description") or str(target.get("const", ""))
            assert words, (path, key)
            if re.search(r"(?:^|_)gib$", key):
                assert "GiB" in words, (path, key)
            if "bytes" in key:
                assert "bytes" in words, (path, key)
    assert len(keys) > 70


def test_the_words_of_the_schema_are_those_of_the_code():
    definitions = SCHEMA["$defs"]

    def words(definition, key):
        return definitions[definition]["properties"][key]["enum"]

    assert list(definitions["by_part"]["properties"]) == list(Part)
    assert words("plan", "verdict") == list(Verdict)
    assert words("plan", "engine") == list(ENGINES)
    assert words("plan", "role") == list(get_args(get_type_hints(MemoryRequest)["role"]))
    assert sorted(words("kv", "dtype")) == sorted(KvDtype)
    assert sorted(words("kv", "layout")) == sorted(KvLayout)
    assert words("storage", "experts") == list(FORMATS)
    options = {option for command in json.loads(OPTIONS.read_text()).values() for option in command}
    assert set(words("budget", "fraction_option")) < options


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--engine foo", "--engine foo is not known"),
        ("--gpu h2000", "unknown GPU 'h2000'"),
        ("--tp 0", "--tp 0 is no size"),
        ("--mem-fraction-static 1.5", "is no share of a GPU"),
        ("--to int4", "shows every recipe as published and as INT4"),
    ],
)
def test_a_mistake_is_one_in_the_overview_too(line, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(line)
    assert result.code == 2
    assert words in result.err


def test_group_size_and_rest_are_those_of_the_int4_side_of_a_comparison():
    plans = run("glm-5.2 --compare FP8,INT4 --rest fp8 --group-size 64 --json").document()["plans"]
    assert [plan["scheme"] for plan in plans] == ["FP8", "INT4 experts in groups of 64, rest FP8"]


HOSTILE = "\x1b[31m[bold]x[/nothing]\u202e\x07"


def hostile_log(here):
    (here / "hostile.log").write_text(SGLANG_LOG.replace("zai-org/GLM-5.2-FP8", HOSTILE))
    return "glm-5.2 --check hostile.log --html page.html"


def test_text_of_other_people_moves_no_terminal(here):
    result = run(hostile_log(here))
    assert result.code == 0
    assert "Against the log of " in result.out
    page = (here / "page.html").read_text(encoding="utf-8")
    for text in (result.out, result.err, page):
        assert not {character for character in text if character != "\n" and not character.isprintable()}
    assert r"[bold]x[/nothing]\u202e\u0007" in result.out


def test_markup_of_other_people_is_text_on_a_terminal(here):
    """A terminal of its own: only there are tables drawn by rich."""
    line = hostile_log(here)
    code = "import sys; sys.argv[0] = 'quantkit'; from quantkit.cli.app import main; main()"
    command = shlex.join([sys.executable, "-c", code, "memory-plan", *shlex.split(line)])
    env = {key: value for key, value in os.environ.items() if key != "CI"}
    ran = subprocess.run(
        ["script", "-qec", command, "/dev/null"], capture_output=True, text=True, check=False, cwd=here, env=env
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "Against the log of" in ran.stdout
    assert r"[bold]x[/nothing]\u202e\u0007" in ran.stdout


@pytest.mark.parametrize("as_json", ["", "--json"])
def test_what_an_encoding_does_not_have_is_spelled_out(as_json, here):
    folder = write_config(here / "mod\u00e8le", tiny_config("glm4_moe"))
    result = process(f"./{folder.name} --tp 1 {as_json}", cwd=here, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (result.code, result.err) == (0, "")
    if as_json:
        assert result.document()["model"] == "mod\u00e8le"
    else:
        assert r"Memory plan: mod\xe8le, BF16" in result.out


def test_a_name_that_is_no_text_is_spelled_out(here):
    folder = here / os.fsdecode(b"mod\xe8le")
    write_config(folder, tiny_config("glm4_moe"))
    result = process(f"{shlex.quote('./' + folder.name)} --tp 1 --json", cwd=here)
    assert (result.code, result.err) == (0, "")
    assert result.document()["model"] == "mod\udce8le"


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        (
            "> /dev/full",
            5,
            "quantkit: the output cannot be written (No space left on device); make room, or send it elsewhere\n",
        ),
    ],
)
@pytest.mark.parametrize("as_json", ["", "--json"])
def test_output_that_goes_nowhere(redirection, code, message, as_json, here):
    write_config(here / "model", tiny_config("glm4_moe"))
    python = f"{sys.executable} -c 'from quantkit.cli.app import main; main()'"
    command = f"{python} memory-plan ./model --tp 1 {as_json} {redirection}"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=here)
    assert (ran.returncode, ran.stderr) == (code, message)


def test_a_page_is_not_written_through_what_lies_there(here):
    """Whatever name the draft has, it is new."""
    (here / "victim.txt").write_text("precious")
    (here / ".page.html.partial").symlink_to("victim.txt")
    assert run("glm-5.2 --html page.html").code == 0
    assert (here / "victim.txt").read_text() == "precious"
    assert (here / "page.html").is_file()
    assert not (here / "page.html").is_symlink()


NO_TEXT = "\u009b31m\u202e\u200f\U000e0041"


def test_json_and_names_of_folders_move_no_terminal(here):
    folder = write_config(here / f"X\nVerdict: fits{NO_TEXT}", tiny_config("glm4_moe"))
    as_json = run(f"{shlex.quote('./' + folder.name)} --tp 1 --json")
    assert as_json.document()["model"] == f"X Verdict: fits{NO_TEXT}"
    assert as_json.out.replace("\n", "").isprintable()
    assert r"\u009b31m\u202e\u200f\udb40\udc41" in as_json.out
    plain = run(f"{shlex.quote('./' + folder.name)} --tp 1 --context 512")
    assert plain.out.count("\nVerdict: ") == 1


@pytest.mark.parametrize(("line", "code"), [("nosuch", 2), ("nosuch --json", 2), ("glm-5.2 --gpu h100", 5)])
def test_an_error_that_cannot_be_told_keeps_its_code(line, code):
    python = f"{sys.executable} -c 'from quantkit.cli.app import main; main()'"
    ran = subprocess.run(["bash", "-c", f"{python} memory-plan {line} 2>/dev/full"], capture_output=True, check=False)
    assert ran.returncode == code


def test_an_error_does_not_quote_a_whole_file(here):
    write_config(here / "long", {**tiny_config("glm4_moe"), "num_hidden_layers": "A" * 3_000_000})
    result = run("./long --tp 1")
    assert result.code == 3
    assert len(result.err) < 1200
    assert result.err.endswith("...; take config.json from the source again\n")


def test_a_config_larger_than_any_is_not_parsed(here):
    write_config(here / "large", '{"a": [' + "[]," * 6_000_000 + "[]]}")
    assert "config.json: is too large to be JSON" in run("./large").err


def test_the_overview_says_what_was_asked_for():
    head = run("--tp 8 --context 128K --concurrency 2").out.splitlines()[0]
    assert head.endswith(
        "--tp-size 8 --context-length 131072; weights in GiB and tokens a rank, 2 x 131,072 tokens asked for"
    )
    head = run("--concurrency 1").out.splitlines()[0]
    assert head.endswith("1 x the model's full context asked for")


@pytest.mark.parametrize(("text", "tokens"), [("131072", 131_072), ("128k", 131_072), ("128K", 131_072)])
def test_contexts_may_be_counted_in_units_of_1024(text, tokens):
    assert run(f"glm-5.2 --context {text} --json").document()["demand"]["context"] == tokens


@pytest.mark.parametrize("text", ["k", "1.5k", "128kk", "128kK", "128m", "many", "1e5"])
def test_a_context_that_is_no_number_is_refused(text):
    result = run(f"glm-5.2 --context {text}")
    assert (result.code, result.out) == (2, "")
    assert "is no number of tokens: give 131072 or 128k" in result.err


def test_the_flags_and_the_role_are_said_in_the_engines_words():
    options = "--role decode --context 8192 --mem-fraction-static 0.85 --kv-dtype fp8 --enforce-eager"
    result = run(f"glm-5.2 {options} --max-running-requests 16 --dp-attention 8 --ep 8")
    assert result.out.splitlines()[1:3] == [
        "sglang 0.5.23, decode pool, 8 x H200 141GB (139.8 GiB each)",
        "Flags: --tp-size 8 --ep-size 8 --attn-dp-size 8 --context-length 8192 --mem-fraction-static 0.85 "
        "--kv-cache-dtype fp8_e4m3 --max-running-requests 16 --disaggregation-mode decode --disable-cuda-graph",
    ]
    line = (
        "glm-5.2 --engine vllm --context 8192 --kv-dtype fp8 --ep 8 --gpu-memory-utilization 0.9 --enforce-eager --json"
    )
    assert run(line).document()["launch_flags"] == (
        "--tensor-parallel-size 8 --enable-expert-parallel --max-model-len 8192 --gpu-memory-utilization 0.9 "
        "--kv-cache-dtype fp8 --enforce-eager"
    )


def test_a_pool_below_nothing_is_said_in_words():
    result = run("glm-5.2 --gpu h100")
    assert result.cells("KV pool")[0] == "short by 27.51 GiB"
    assert "-27.51" not in result.out
    assert run("glm-5.2 --gpu h100 --json").document()["ranks"][0]["kv_pool_gib"] == pytest.approx(-27.51, abs=0.01)


def test_a_comparison_says_what_convert_does_not_write():
    words = "quantkit convert does not write this yet"
    result = run("glm-5.2 --compare fp8,bf16 --context 8192")
    assert f"BF16: {words}" in result.out
    for options in ("", " --rest fp8"):
        assert words not in run(f"glm-5.2 --compare fp8,int4 --context 8192{options}").out


def test_a_scheme_is_not_compared_with_itself():
    result = run("glm-5.2 --compare int4,INT4")
    assert (result.code, result.out) == (2, "")
    assert "compares a scheme with itself" in result.err
