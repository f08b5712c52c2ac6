"""What the modules with INT4 weights refuse, and modules without memory: nothing is computed of what was not loaded."""

import pytest
import torch

from quantkit_kernels import ops
from quantkit_kernels.modules import Int4Experts, Int4Linear
from tests.kernels.compare import assert_same_tensors
from tests.kernels.int4_weights import router, stored_experts, stored_linear, tokens

pytestmark = pytest.mark.gpu
GROUP = 32


def linear_of(stored, device, **rest):
    linear = Int4Linear(160, 70, group_size=GROUP, device=device, **rest)
    linear.load(stored)
    return linear


def test_without_memory_nothing_is_loaded(device):
    stored = stored_linear(70, 160, device)
    linear = Int4Linear(160, 70, group_size=GROUP, device="meta")
    with pytest.raises(RuntimeError, match="the module is on meta: give it memory"):
        linear.load_state_dict(stored)
    with pytest.raises(ValueError, match="the module is on meta"):
        linear.load(stored)
    experts = Int4Experts(4, 256, 64, group_size=GROUP, device="meta")
    with pytest.raises(RuntimeError, match="the module is on meta"):
        experts.load_state_dict(stored_experts(device)[0])
    real = Int4Linear(160, 70, group_size=GROUP, device=device)
    with pytest.raises(RuntimeError, match="tensors on meta hold nothing to load"):
        real.load_state_dict(linear.state_dict())


@pytest.mark.parametrize("way", ["assign", "to_empty"])
def test_memory_can_be_given_later(way, device):
    bias = torch.randn(70).to(device, torch.bfloat16)
    stored, parts = stored_linear(70, 160, device) | {"bias": bias}, stored_experts(device)[0]
    expert_map = torch.tensor([-1, 0, 1, 2, 3], dtype=torch.int32)
    linear = Int4Linear(160, 70, group_size=GROUP, bias=torch.zeros(70, dtype=torch.bfloat16), device="meta")
    experts = Int4Experts(4, 256, 64, group_size=GROUP, expert_map=expert_map, device="meta")
    for module, tensors in ((linear, stored), (experts, parts)):
        if way == "to_empty":
            module.to_empty(device=device)
        module.load_state_dict(tensors, assign=way == "assign")
        assert all(one.device.type == device for one in (*module.buffers(), *module.parameters()))
        assert_same_tensors(module.state_dict(), tensors)
    assert experts.expert_map.tolist() == expert_map.tolist()
    assert linear(tokens(2, device, num_cols=160)).isfinite().all()


def test_a_product_with_what_is_elsewhere_is_refused(device):
    """On meta torch would hand out memory that nothing has written."""
    x, (weight, ids) = tokens(3, device), router(3, device)
    with pytest.raises(ValueError, match=r"activations are on \w+(:0)?, a weight or the router's choice on meta"):
        Int4Linear(256, 70, group_size=GROUP, device="meta")(x)
    with pytest.raises(ValueError, match="a weight or the router's choice on meta"):
        Int4Experts(4, 256, 64, group_size=GROUP, device="meta")(x, ids, weight)
    with pytest.raises(ValueError, match="activations are on meta"):
        Int4Linear(256, 70, group_size=GROUP, device=device)(x.to("meta"))
    assert Int4Linear(256, 70, group_size=GROUP, device="meta")(x.to("meta")).shape == (3, 70)


@pytest.mark.parametrize("is_interpreted", [False, True])
def test_activations_and_choices_are_checked_on_every_device(is_interpreted, device, monkeypatch):
    monkeypatch.setattr(ops, "IS_INTERPRETED", is_interpreted)
    x, (weight, ids) = tokens(3, device), router(3, device)
    linear = Int4Linear(256, 70, group_size=GROUP, device=device)
    experts = Int4Experts(4, 256, 64, group_size=GROUP, device=device)
    for dtype in (torch.float32, torch.int32):
        for call in (linear, lambda x: experts(x, ids, weight)):
            with pytest.raises(ValueError, match=f"activations are BF16 or FP16 .*, not {dtype}"):
                call(x.to(dtype))
    with pytest.raises(ValueError, match=r"a weight \(70, 128\) in groups of 32 has words"):
        linear(x[:, :128])
    with pytest.raises(ValueError, match=r"gate_up \(4, 128, 128\) in groups of 32 has words"):
        experts(x[:, :128], ids, weight)
    with pytest.raises(ValueError, match=r"activations are BF16 or FP16 \[tokens, columns\]"):
        experts(x[0], ids, weight)
    with pytest.raises(ValueError, match="topk_ids is int32 or int64 on"):
        experts(x, ids.float(), weight)
    with pytest.raises(ValueError, match=r"3 tokens, weights \(2, 2\), ids \(2, 2\)"):
        experts(x, ids[:2], weight[:2])
    with pytest.raises(ValueError, match=r"3 tokens, weights \(3, 2\), ids \(3, 1\)"):
        experts(x, ids[:, :1], weight)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"in_features": 500}, "in_features is 500: no whole groups of 32"),
        ({"out_features": 0}, "out_features is 0, not at least 1"),
        *(({"group_size": group}, f"group_size is {group}, not one of 32, 64, 128") for group in (16, 0, -32)),
        ({"bias": torch.zeros(71)}, r"the bias is floats \[70\], not torch.float32 \(71,\)"),
        ({"bias": torch.zeros(70, dtype=torch.int32)}, "the bias is floats"),
    ],
)
def test_a_linear_that_cannot_work_is_not_made(sizes, words):
    with pytest.raises(ValueError, match=words):
        Int4Linear(**({"in_features": 256, "out_features": 70, "group_size": 32} | sizes))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"hidden_dim": 100}, "hidden_dim is 100: no whole groups of 32"),
        ({"intermediate_dim": 100}, "intermediate_dim is 100: no whole groups of 32"),
        ({"num_experts": 0}, "num_experts is 0, not at least 1"),
        ({"expert_map": torch.tensor([0, 4])}, "expert_map has numbers beside -1 and those of 4 experts, 0 to 3"),
        ({"expert_map": torch.tensor([-2, 3])}, "expert_map has numbers beside -1"),
        ({"expert_map": torch.tensor([0.0])}, r"expert_map is int32 \[global experts\], not torch.float32 \(1,\)"),
        ({"expert_map": torch.tensor([[0]])}, r"expert_map is int32 \[global experts\]"),
    ],
)
def test_experts_that_cannot_work_are_not_made(sizes, words):
    with pytest.raises(ValueError, match=words):
        Int4Experts(**({"num_experts": 4, "hidden_dim": 256, "intermediate_dim": 64, "group_size": 32} | sizes))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_zero_point": torch.zeros(1)}, "nothing here takes weight_zero_point"),
        ({"weight_g_idx": torch.zeros(1)}, "nothing here takes weight_g_idx"),
        ({"weight_scale": None}, "weight_scale is missing"),
        ({"weight_shape": torch.tensor(70)}, r"a weight \(70, 160\) is stored as words \(70, 20\) of 70"),
        ({"weight_shape": torch.tensor([[70, 160]])}, r"of \[\[70, 160\]\]"),
        ({"bias": torch.zeros(1)}, r"the bias is floats \[70\], not torch.float32 \(1,\)"),
    ],
)
def test_parts_of_another_weight_are_refused(change, words, device):
    linear = Int4Linear(160, 70, group_size=GROUP, bias=torch.zeros(70), device=device)
    with pytest.raises(ValueError, match=words):
        linear.load(stored_linear(70, 160, device) | change)
    experts = Int4Experts(4, 256, 64, group_size=GROUP, device=device)
    parts = {name[2:]: one for name, one in stored_experts(device)[0].items() if name.startswith("0.")}
    with pytest.raises(ValueError, match=r"up_proj\.weight_|a weight \(64, 256\) is stored|nothing here takes"):
        experts.load_expert(0, parts | {f"up_proj.{name}": one for name, one in change.items()})


def test_a_part_that_is_not_there_and_an_expert_that_is_not_here_are_named(device):
    stored = stored_linear(70, 160, device)
    with pytest.raises(ValueError, match="weight_packed is missing"):
        linear_of({name: one for name, one in stored.items() if name != "weight_packed"}, device)
    with pytest.raises(ValueError, match="nothing here takes bias"):
        linear_of(stored | {"bias": torch.zeros(70)}, device)
    with_bias = Int4Linear(160, 70, group_size=GROUP, bias=torch.zeros(70), device=device)
    with pytest.raises(RuntimeError, match=r"the bias is floats \[70\]"):
        with_bias.load_state_dict(stored | {"bias": torch.zeros(1)})
    for expert in (-1, 4):
        with pytest.raises(ValueError, match=f"there is no expert {expert} of 4"):
            Int4Experts(4, 256, 64, group_size=GROUP, device=device).load_expert(expert, {})


def test_the_output_has_the_dtype_of_the_input_whatever_the_bias_is(device):
    bias = torch.randn(70, generator=torch.Generator().manual_seed(9))
    stored, x = stored_linear(70, 160, device), tokens(2, device, num_cols=160)
    plain = linear_of(stored, device)
    for dtype in (torch.bfloat16, torch.float16):
        got = linear_of(stored, device, bias=bias)(x.to(dtype))
        assert got.dtype == dtype
        assert torch.equal(got, (plain(x.to(dtype)) + bias.to(device)).to(dtype))


def test_a_printed_module_tells_its_sizes():
    assert repr(Int4Linear(160, 70, group_size=32)) == (
        "Int4Linear(in_features=160, out_features=70, group_size=32, bias=False)"
    )
    assert repr(Int4Experts(4, 256, 64, group_size=32)) == (
        "Int4Experts(num_experts=4, hidden_dim=256, intermediate_dim=64, group_size=32)"
    )
