"""Random INT4 weights, experts, tokens and routers for the tests of products."""

import torch

from quantkit_kernels.word_order import repack

EXPERTS, COLS, WIDTH, TOP_K = 4, 256, 64, 2


def random_int4(shape, group_size, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(-(2**31), 2**31, (*shape[:-1], shape[-1] // 8), generator=generator).to(torch.int32)
    scale = torch.randn((*shape[:-1], shape[-1] // group_size), generator=generator).to(torch.bfloat16)
    return packed.to(device), scale.to(device)


def experts(device, *, group_size=32, num_experts=EXPERTS, num_cols=COLS, width=WIDTH):
    gate_up = random_int4((num_experts, 2 * width, num_cols), group_size, device, seed=1)
    down = random_int4((num_experts, num_cols, width), group_size, device, seed=2)
    for _, scale in (gate_up, down):
        scale.mul_(0.03)  # hidden values stay where SiLU bends
    return (*gate_up, *down)


def repacked(weights, group_size=32):
    return (*repack(*weights[:2], group_size=group_size), *repack(*weights[2:], group_size=group_size))


def tokens(num_tokens, device, *, num_cols=COLS, dtype=torch.bfloat16):
    return torch.randn((num_tokens, num_cols), generator=torch.Generator().manual_seed(3)).to(dtype).to(device)


def router(num_tokens, device, *, num_experts=EXPERTS, top_k=TOP_K, seed=4):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand((num_tokens, num_experts), generator=generator).topk(top_k).indices.to(torch.int32)
    return torch.rand((num_tokens, top_k), generator=generator).to(device), ids.to(device)


def stored_linear(num_rows, num_cols, device):
    """A weight as a checkpoint names its parts."""
    packed, scale = random_int4((num_rows, num_cols), 32, device)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([num_rows, num_cols])}


def stored_experts(device, num_experts=4, num_cols=256, width=64):
    gate_up, gate_up_scale, down, down_scale = experts(device, num_experts=num_experts, num_cols=num_cols, width=width)
    stored = {}
    for expert in range(num_experts):
        for name, words, scale, cols in (
            ("gate_proj", gate_up[expert, :width], gate_up_scale[expert, :width], num_cols),
            ("up_proj", gate_up[expert, width:], gate_up_scale[expert, width:], num_cols),
            ("down_proj", down[expert], down_scale[expert], width),
        ):
            stored[f"{expert}.{name}.weight_packed"] = words
            stored[f"{expert}.{name}.weight_scale"] = scale
            stored[f"{expert}.{name}.weight_shape"] = torch.tensor([len(words), cols])
    return stored, (gate_up, gate_up_scale, down, down_scale)
