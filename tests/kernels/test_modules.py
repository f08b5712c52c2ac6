"""Modules with INT4 weights: a checkpoint's names in and out, and what torch.compile sees."""

import pytest
import torch

from quantkit_kernels import ops, reference
from quantkit_kernels.modules import Int4Experts, Int4Linear
from quantkit_kernels.ops import int4_experts, int4_linear
from tests.kernels.compare import assert_close, assert_same_tensors
from tests.kernels.int4_weights import router, stored_experts, stored_linear, tokens

pytestmark = pytest.mark.gpu
GROUP = 32


def test_a_linear_takes_and_gives_the_checkpoints_tensors(device):
    stored = stored_linear(70, 160, device)
    linear = Int4Linear(160, 70, group_size=GROUP, device=device)
    assert linear.load_state_dict(stored, strict=True).missing_keys == []
    assert_same_tensors(linear.state_dict(), stored)
    x = tokens(5, device, num_cols=160)
    expected = reference.int4_gemm(x.double(), stored["weight_packed"], stored["weight_scale"], group_size=GROUP)
    assert_close("linear", expected, linear(x), most=2.0**-8)


def test_a_bias_is_added_and_kept(device):
    stored = stored_linear(70, 160, device) | {"bias": torch.randn(70).to(device, torch.bfloat16)}
    linear = Int4Linear(160, 70, group_size=GROUP, bias=torch.zeros_like(stored["bias"]), device=device)
    linear.load_state_dict(stored)
    assert_same_tensors(linear.state_dict(), stored)
    plain = Int4Linear(160, 70, group_size=GROUP, device=device)
    plain.load_state_dict({name: one for name, one in stored.items() if name != "bias"})
    x = tokens(2, device, num_cols=160)
    assert torch.equal(linear(x), plain(x) + stored["bias"])


def test_experts_take_and_give_the_checkpoints_tensors(device):
    stored, weights = stored_experts(device)
    module = Int4Experts(4, 256, 64, group_size=GROUP, device=device)
    module.load_state_dict(stored, strict=True)
    assert_same_tensors(module.state_dict(), stored)
    x, (weight, ids) = tokens(6, device), router(6, device)
    expected = reference.int4_moe(x.double(), *weights, weight, ids, group_size=GROUP)
    assert_close("experts", expected, module(x, ids, weight), most=2.0**-7)


def test_a_cast_of_the_model_leaves_scales_alone(device):
    """Their bits mean BF16, whatever a model computes in."""
    stored, _ = stored_experts(device)
    module = nn_around(Int4Experts(4, 256, 64, group_size=GROUP, device=device))
    module.experts.load_state_dict(stored)
    x, (weight, ids) = tokens(3, device), router(3, device)
    expected = module.experts(x, ids, weight)
    module.half()
    assert_same_tensors(module.experts.state_dict(), stored)
    assert torch.equal(module.float().experts(x, ids, weight), expected)


def test_experts_of_a_rank(device):
    """The second half of four experts: ids stay those of the whole model."""
    stored, weights = stored_experts(device)
    expert_map = torch.tensor([-1, -1, 0, 1], dtype=torch.int32, device=device)
    module = Int4Experts(2, 256, 64, group_size=GROUP, expert_map=expert_map, device=device)
    for expert in (0, 1):
        own = {name[2:]: one for name, one in stored.items() if name.startswith(f"{expert + 2}.")}
        module.load_expert(expert, own)
    x, (weight, ids) = tokens(6, device), router(6, device)
    weight = torch.where(ids >= 2, weight, 0.0)
    expected = reference.int4_moe(x.double(), *weights, weight, ids, group_size=GROUP)
    assert_close("experts", expected, module(x, ids, weight), most=2.0**-7)
    assert "expert_map" not in module.state_dict()


@pytest.mark.parametrize("name", ["1.up_proj.weight_scale", "3.down_proj.weight_shape"])
def test_a_tensor_that_is_missing_is_named(name, device):
    stored, _ = stored_experts(device)
    del stored[name]
    module = nn_around(Int4Experts(4, 256, 64, group_size=GROUP, device=device))
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "experts.{name}"'):
        module.load_state_dict({f"experts.{key}": one for key, one in stored.items()})


def test_a_tensor_too_many_or_of_another_shape_is_named(device):
    stored, _ = stored_experts(device)
    module = nn_around(Int4Experts(4, 256, 64, group_size=GROUP, device=device))
    named = {f"experts.{key}": one for key, one in stored.items()}
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "experts.4.gate_proj.weight_packed"'):
        module.load_state_dict(
            named | {"experts.4.gate_proj.weight_packed": named["experts.0.gate_proj.weight_packed"]}
        )
    wrong = named | {"experts.0.up_proj.weight_shape": torch.tensor([64, 128])}
    with pytest.raises(RuntimeError, match=r"experts: a weight \(64, 256\) is stored as words"):
        module.load_state_dict(wrong)


def nn_around(experts):
    module = torch.nn.Module()
    module.experts = experts
    return module


def test_without_a_gpu_the_twins_compute(monkeypatch):
    monkeypatch.setattr(ops, "IS_INTERPRETED", False)
    for name in ("int4_gemm", "int4_moe"):
        monkeypatch.setattr(ops, name, None)
    test_a_linear_takes_and_gives_the_checkpoints_tensors("cpu")
    test_experts_take_and_give_the_checkpoints_tensors("cpu")


def test_operators_are_what_their_fakes_say(device):
    linear = Int4Linear(160, 70, group_size=GROUP, device=device)
    linear.load_state_dict(stored_linear(70, 160, device))
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    x = tokens(3, device, num_cols=160)
    torch.library.opcheck(int4_linear, (x, linear.words, linear.scale.view(torch.bfloat16), GROUP), test_utils=checks)
    module = Int4Experts(4, 256, 64, group_size=GROUP, device=device)
    module.load_state_dict(stored_experts(device)[0])
    weight, ids = router(3, device)
    scales = [one.view(torch.bfloat16) for one in (module.gate_up_scale, module.down_scale)]
    arguments = (module.gate_up_words, scales[0], module.down_words, scales[1], weight, ids, GROUP)
    torch.library.opcheck(int4_experts, (tokens(3, device), *arguments), test_utils=checks)


def test_compiling_finds_one_graph(device):
    """No break in the graph, and the same bytes; the number of tokens may change."""
    linear = Int4Linear(160, 70, group_size=GROUP, device=device)
    linear.load_state_dict(stored_linear(70, 160, device))
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_tokens in (3, 5):
        x = tokens(num_tokens, device, num_cols=160)
        assert torch.equal(compiled(x), linear(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are recorded on a GPU")
def test_a_graph_records_the_experts(device):
    module = Int4Experts(4, 256, 64, group_size=GROUP, device=device)
    module.load_state_dict(stored_experts(device)[0])
    x, (weight, ids) = tokens(6, device), router(6, device)
    expected = module(x, ids, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(x, ids, weight)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
