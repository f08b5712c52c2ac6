"""Flags of both engines: what pools agree on, what the model asks for, what the contract refuses."""

from dataclasses import replace

import pytest

from quantkit.engines.launch import Launch
from quantkit.engines.parallel import Parallel
from quantkit.errors import SourceError, UsageError, VerificationError
from quantkit.memory.kv_format import KvDtype
from quantkit.memory.make import make_memory_plan
from quantkit.memory.plan import Verdict
from quantkit.serving import sglang
from quantkit.serving.agreed import agreed_flags
from quantkit.serving.flags import flag
from quantkit.serving.models import parsers_of
from quantkit.serving.request import Network
from tests.convert.helpers import convert
from tests.serving.plans import served, values_of
from tests.tiny import write_checkpoint

SPECULATION = {
    "--speculative-algorithm": ("EAGLE",),
    "--speculative-num-steps": ("3",),
    "--speculative-eagle-topk": ("1",),
    "--speculative-num-draft-tokens": ("4",),
}


def test_a_pair_of_glm_5_2():
    plan = served("glm-5.2", prefill="glm-5.2", context=131072)
    prefill, decode = values_of(plan, "prefill"), values_of(plan, "decode")
    assert prefill["--model-path"] == ("zai-org/GLM-5.2-FP8",)
    assert decode["--model-path"] == ("./glm-5.2-int4",)
    assert decode["--disaggregation-mode"] == ("decode",)
    assert decode["--kv-cache-dtype"] == ("fp8_e4m3",)
    assert decode["--page-size"] == ("64",)
    assert (decode["--dsa-prefill-backend"], decode["--dsa-decode-backend"]) == (
        ("flashmla_sparse_q8",),
        ("flashmla_kv",),
    )
    assert SPECULATION.items() <= prefill.items()
    assert (decode["--tool-call-parser"], decode["--reasoning-parser"]) == (("glm47",), ("glm45",))
    assert "--trust-remote-code" not in decode
    router = next(server for server in plan.servers if server.role == "router")
    assert " ".join(router.argv).startswith(
        "python -m sglang_router.launch_router --pd-disaggregation --prefill http://prefill:30000 8998 "
        "--decode http://decode:30001 "
    )
    assert plan.fits


@pytest.mark.parametrize(
    ("output", "options"),
    [
        ("glm-5.2", {}),
        ("glm-5.2", {"network": Network(ib_device="mlx5_0,mlx5_1")}),
        ("glm-5.2", {"kv_dtype": KvDtype.BF16, "mtp": False}),
        ("kimi-k2.5", {}),
        ("kimi-k2-0905", {"prefill_tp": 16}),
    ],
)
def test_what_is_agreed_is_alike_and_nothing_else_is_said_twice(output, options):
    """Only these may differ between the two pools of a pair."""
    own = {"--model-path", "--tp-size", "--mem-fraction-static", "--disaggregation-mode", "--port"}
    own |= {"--nnodes", "--node-rank", "--dist-init-addr", "--disaggregation-bootstrap-port", "--max-running-requests"}
    plan = served(output, prefill=output, **options)
    prefill, decode = values_of(plan, "prefill"), values_of(plan, "decode")
    different = {name for name in prefill.keys() | decode.keys() if prefill.get(name) != decode.get(name)}
    assert different <= own, different
    agreed = {one.name for one in plan.agreed}
    assert {"--kv-cache-dtype", "--page-size", "--disaggregation-transfer-backend", "--tool-call-parser"} <= agreed
    assert ("--disaggregation-ib-device" in agreed) == ("network" in options)
    assert not agreed & own


def test_two_nodes_for_what_does_not_fit_on_one():
    plan = served("kimi-k2-0905", prefill="kimi-k2-0905", prefill_tp=16)
    first, second = (server for server in plan.servers if server.role == "prefill")
    assert (first.num_gpus, second.num_gpus) == (8, 8)
    ranks = [{one.name: one.values for one in server.flags}["--node-rank"] for server in (first, second)]
    assert ranks == [("0",), ("1",)]
    changed = [(one, other) for one, other in zip(first.argv, second.argv, strict=True) if one != other]
    assert changed == [("0", "1")]
    text = " ".join(first.argv)
    assert "--tp-size 16" in text
    assert "--nnodes 2 --node-rank 0 --dist-init-addr prefill-0:5000" in text
    assert "--trust-remote-code" in first.argv  # its config has an auto_map
    assert not [word for word in text.split() if word.startswith("--dsa") or word.startswith("--spec")]
    hosts = served(
        "kimi-k2-0905", prefill="kimi-k2-0905", prefill_tp=16, network=Network(prefill_hosts=("n0", "n1"), port=40000)
    )
    assert "--dist-init-addr n0:5000" in " ".join(hosts.servers[1].argv)
    assert "--prefill http://n0:40000 8998 --decode http://decode:40001" in " ".join(hosts.servers[-1].argv)


def test_flags_and_memory_plan_say_the_same():
    plan = served("glm-5.2", prefill="glm-5.2", context=65536, concurrency=8)
    for pool in plan.pools:
        flags, memory = values_of(plan, pool.role), pool.plan
        fraction = float(flags["--mem-fraction-static"][0])
        assert memory.request.fraction == fraction
        assert make_memory_plan(pool.served.model, memory.request).num_tokens == memory.num_tokens
        assert flags["--context-length"] == (str(memory.demand.context),)
    assert values_of(plan, "decode")["--max-running-requests"] == ("8",)
    assert plan.pools[1].plan.request.max_running_requests == 8
    assert plan.pools[1].plan.demand.tokens == 8 * 65536
    assert plan.pools[0].plan.demand.tokens == 65536  # a prefill pool holds one by one
    assert not served("glm-5.2", context=131072, concurrency=64).fits


def test_one_pool_of_each_engine():
    glm = served("glm-4.7")
    flags = values_of(glm, "both")
    assert flags["--disable-shared-experts-fusion"] == ()  # the contract asks for it
    assert flags["--kv-cache-dtype"] == ("bfloat16",)  # no scales are known for heads
    assert flags["--tool-call-parser"] == ("glm47",)
    assert "--dsa-decode-backend" not in flags
    assert "--disaggregation-mode" not in flags
    assert len(glm.servers) == 1
    vllm = served("glm-5.2", engine="vllm", concurrency=4, context=65536).servers[0]
    assert vllm.argv[:3] == ("vllm", "serve", "./glm-5.2-int4")
    text = " ".join(vllm.argv)
    for words in (
        "--tensor-parallel-size 8 --gpu-memory-utilization 0.92 --max-model-len 65536 --max-num-seqs 4",
        "--kv-cache-dtype fp8 --spec-method mtp --spec-tokens 3",
        "--enable-auto-tool-choice --tool-call-parser glm47 --reasoning-parser glm45",
    ):
        assert words in text
    nodes = served("kimi-k2.5", engine="vllm", parallel=Parallel(tp=16)).servers
    assert ["--headless" in node.argv for node in nodes] == [False, True]
    assert all("--master-addr server-0" in " ".join(node.argv) for node in nodes)


def test_plain_experts_fuse_with_the_shared_one():
    plan = served("glm-4.7", prefill="glm-4.7")
    assert "--disable-shared-experts-fusion" not in values_of(plan, "prefill")
    assert "--disable-shared-experts-fusion" in values_of(plan, "decode")


def test_every_flag_has_a_reason_on_one_line():
    for plan in (served("glm-5.2", prefill="glm-5.2", context=131072), served("glm-5.2", engine="vllm")):
        for server in plan.servers:
            assert all(one.why and one.why.isprintable() for one in server.flags)


@pytest.fixture(scope="module")
def w4a8(tmp_path_factory):
    """Directories with FP8 activations: w4afp8, and compressed-tensors."""
    root = tmp_path_factory.mktemp("w4a8")
    source = write_checkpoint(root / "source", mtp=True).directory
    for name, changes in (("w4afp8", {"layout": "w4afp8"}), ("dynamic", {"activations": "fp8-dynamic"})):
        convert(source, root / name, **changes)
    return root


def test_w4afp8_is_named_and_may_use_deepep(w4a8):
    output = str(w4a8 / "w4afp8")
    plan = served(output, prefill=str(w4a8 / "source"), backend="deepep", parallel=Parallel(tp=1))
    text = " ".join(next(server for server in plan.servers if server.role == "decode").argv)
    assert "--quantization w4afp8" in text
    assert "--moe-a2a-backend deepep --deepep-mode low_latency" in text
    assert not any(sglang.DISPATCH_VARIABLE in note for note in plan.notes)
    many = served(output, backend="deepep", parallel=Parallel(tp=1), concurrency=33)
    assert any("132 tokens a rank and step are more than the 128" in note for note in many.notes)
    few = served(output, backend="deepep", parallel=Parallel(tp=1), concurrency=32)
    assert not any(sglang.DISPATCH_VARIABLE in note for note in few.notes)


@pytest.mark.parametrize(
    ("name", "engine", "gpu", "is_able"),
    [
        ("w4afp8", "sglang", "h200", True),
        ("w4afp8", "sglang", "a100", False),
        ("w4afp8", "sglang", "mi355x", False),
        ("dynamic", "sglang", "a100", False),
        ("dynamic", "sglang", "b200", True),
    ],
)
def test_fp8_activations_need_their_gpus(name, engine, gpu, is_able, w4a8):
    request = {"engine": engine, "gpu": gpu, "parallel": Parallel(tp=1)}
    if is_able:
        assert served(str(w4a8 / name), **request).fits
        return
    with pytest.raises(VerificationError, match="INT4 experts with FP8 activations on"):
        served(str(w4a8 / name), **request)


def test_compressed_tensors_experts_are_refused_over_deepep():
    with pytest.raises(VerificationError, match="deepep builds and loads") as caught:
        served("glm-5.2", backend="deepep")
    assert "w4afp8" in caught.value.remedy


def test_a_draft_of_another_checkpoint_is_sglangs_alone():
    plan = served("glm-5.2", prefill="glm-5.2", draft="glm-5.2")
    assert values_of(plan, "decode")["--speculative-draft-model-path"] == ("zai-org/GLM-5.2-FP8",)
    assert "--speculative-draft-model-path" not in values_of(plan, "prefill")
    with pytest.raises(UsageError, match="--draft is an option of sglang"):
        served("glm-5.2", engine="vllm", draft="glm-5.2")


@pytest.mark.parametrize(
    ("output", "options", "words"),
    [
        ("glm-5.2", {"engine": "vllm", "prefill": "glm-5.2"}, "--prefill is an option of sglang"),
        ("glm-5.2", {"engine": "vllm", "backend": "deepep"}, "not planned for vllm"),
        ("glm-5.2", {"prefill_tp": 16}, "are of a prefill pool"),
        ("glm-5.2", {"network": Network(ib_device="mlx5_0")}, "from prefill to decode"),
        ("glm-5.2", {"network": Network(hosts=("a", "b"))}, "names 2 hosts, the pool has 1"),
        ("glm-5.2", {"network": Network(hosts=("a b",))}, "is no host"),
        ("glm-5.2", {"network": Network(port=70000)}, "is no port"),
        ("glm-5.2", {"backend": "deepep", "parallel": Parallel(tp=8, ep=4)}, "all 8 ranks"),
        ("glm-5.2", {"backend": "pigeons"}, "is not known"),
        ("glm-5.2", {"mtp": False, "draft": "glm-5.2"}, "for speculation"),
        ("kimi-k2.5", {"mtp": True}, "has no MTP layer"),
        ("kimi-k2-0905", {"parallel": Parallel(tp=5)}, "legal"),
        ("glm-5.2", {"context": 10**8}, "more than"),
    ],
)
def test_options_that_do_not_go_together(output, options, words):
    with pytest.raises(UsageError) as caught:
        served(output, **options)
    assert words in str(caught.value)


def test_a_prefill_of_another_model_is_refused():
    with pytest.raises(SourceError, match="another model"):
        served("glm-5.2", prefill="glm-4.7")


@pytest.mark.parametrize(
    ("model_type", "names", "tool"),
    [
        ("glm4_moe", ("zai-org/GLM-4.5-Air",), "glm45"),
        ("glm4_moe", ("glm-4.6",), "glm45"),
        ("glm4_moe", ("", "my-copy", "zai-org/GLM-4.7"), "glm47"),
        ("glm4_moe", ("mine",), None),
        ("kimi_k25", (), "kimi_k2"),
        ("qwen3_moe", (), None),
    ],
)
def test_parsers_by_type_and_name(model_type, names, tool):
    found = parsers_of(model_type, names)
    assert (None if found is None else found.tool) == tool


def test_what_cannot_stand_on_one_line_is_refused():
    with pytest.raises(UsageError, match="cannot stand in a launch line"):
        flag("--model-path", "a\nb", why="")
    assert flag("--x", why="a\nb\tc").why == "a b c"


def test_unlike_rows_are_never_paired():
    plan = served("glm-5.2", prefill="glm-5.2", context=131072)
    odd = replace(plan.pools[0], page_tokens=1)
    with pytest.raises(UsageError, match="differently"):
        agreed_flags(plan.request, (odd, plan.pools[1]), has_mtp=False)


def test_the_contract_is_asked_with_the_flags_that_it_wants():
    pool = served("glm-4.7").pools[0]
    assert pool.needed
    assert not pool.report.bad_rows
    assert pool.plan.verdict is not Verdict.DOES_NOT_FIT
    assert pool.served.check(Launch(engine="sglang", parallel=pool.parallel)).worst.value == "needs a flag"
