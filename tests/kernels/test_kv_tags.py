"""Page tags: what kernels leave in every array, and in the ring, is what the twins in plain torch leave."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit_kernels import kv_tags, reference
from quantkit_kernels.kv_tag_arrays import FREE_INDEX, NEVER, PRUNED, State
from quantkit_kernels.kv_tag_lines_jit import mix
from tests.kernels.kv_tag_pools import Both, new_pool, numbers, seal_of, signed, stored_seal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("quiet_numpy")]


@triton.jit
def mix_kernel(in_ptr, out_ptr):
    at = tl.arange(0, 4)
    tl.store(out_ptr + at, mix(tl.load(in_ptr + at).to(tl.uint64)).to(tl.int64))


def test_it_mixes_as_splitmix64_does(device):
    """Its first outputs of seed 0, as they are published."""
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    states = numbers([signed(0x9E3779B97F4A7C15 * number) for number in range(1, 5)], device)
    out = torch.zeros_like(states)
    mix_kernel[(1,)](states, out)
    assert [number % (1 << 64) for number in out.tolist()] == outputs


@pytest.mark.parametrize("module", [kv_tags, reference])
def test_seals_as_literals(module, device):
    pool = new_pool(device, num_pages=8)
    placed = [numbers(one, device) for one in ([5, 7], [0, 3], [0, 6], [-1, 1 << 62])]
    pool.run(module, "grant_pages", *placed, first_generation=1, step=0)
    pool.run(module, "release_pages", numbers([7], device), first_generation=(1 << 64) - 1, step=0)
    assert [number % (1 << 64) for number in pool.seals_P[[5, 7]].tolist()] == [0x8D6722FC4D4F3470, 0xABC4C867495FB4D1]
    assert pool.seals_RL[0, 0].item() % (1 << 64) == 0xDC7D8D744B6CCC92
    assert pool.records_P3[[5, 7]].tolist() == [[1, -1, 0], [-1, 0, FREE_INDEX]]
    assert pool.states_P[[5, 7]].tolist() == [State.HELD, 0]


def test_seals_are_those_of_pythons_integers(device):
    """Generations are counted round, and 0 is left out."""
    pool, first = new_pool(device, num_pages=300, num_rows=2, most_pages=200), (1 << 64) - 130
    pages, owners = torch.randperm(300)[:260], torch.randint(-(1 << 63), (1 << 63) - 1, (260,))
    owners[:3] = torch.tensor([0, -(1 << 63), (1 << 63) - 1])
    rows, indices = torch.arange(260) // 200, torch.arange(260) % 200
    placed = [one.to(device) for one in (pages, rows, indices, owners)]
    pool.run(kv_tags, "grant_pages", *placed, first_generation=first, step=0)
    for entry, (page, row, index, owner) in enumerate(zip(*(one.tolist() for one in placed), strict=True)):
        generation = first + entry if entry < 130 else entry - 129
        assert pool.seals_P[page].item() == signed(stored_seal(generation, owner, index, page))
        assert pool.records_P3[page].tolist() == [signed(generation), owner, index]
        assert pool.seals_RL[row, index].item() == signed(seal_of(generation, owner, index))
        assert pool.details_RL2[row, index].tolist() == [signed(generation), owner]
    assert int(pool.count_1) == 0


@settings(max_examples=15)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1, 1, 1), (9, 2, 3), (70, 3, 40), (40, 4, 12)]),
    st.sampled_from([(1, True), (3, True), (64, True), (64, False)]),
    st.sampled_from([0, 3, 500]),
    st.booleans(),
    st.sampled_from([-1, 0]),
)
def test_a_pools_life(device, seed, sizes, paging, num_lines, has_firsts, null_page):
    """Programs of 32 pages: rows, indices, pages and slots are of every kind that a broken engine may name."""
    (num_pages, num_rows, most_pages), (page_size, by_token) = sizes, paging
    random, step = np.random.default_rng(seed), (1 << 31) + seed
    both = Both(device, num_pages=num_pages, num_rows=num_rows, most_pages=most_pages, num_lines=num_lines, batch=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_tags, "BLOCK", 32)
        patch.setattr(kv_tags, "OPTIONS", kv_tags.OPTIONS | {"BLOCK": 32, "num_warps": 1})
        # distinct pages and places: which of two equal ones comes last is nobody's promise
        some_pages = random.permutation(np.arange(-2, num_pages + 2))
        both.run("release_pages", numbers(some_pages, device), first_generation=(1 << 64) - 40, step=step)
        places = random.permutation([(row, index) for row in range(num_rows) for index in range(most_pages)])
        places = np.concatenate([places, [[-1, 0], [num_rows, 1], [0, most_pages], [0, -1]]])[: len(some_pages)]
        rows, indices = places.T
        owners = random.integers(-(1 << 63), 1 << 63, len(places))
        placed = [numbers(one, device) for one in (some_pages[: len(places)], rows, indices, owners)]
        both.run("grant_pages", *placed, first_generation=1 + seed, step=step)
        both.change("states_P", slice(0, None, 7), State.SHARED)
        both.change("states_P", slice(3, None, 7), State.AWAITING)
        both.change("seals_P", random.integers(num_pages), int(random.integers(1 << 62)))
        for word in (NEVER, PRUNED):
            both.change("seals_RL", (random.integers(num_rows), random.integers(most_pages)), word)

        table = random.integers(-2, num_pages + 2, (num_rows, most_pages))
        for page, row, index in zip(some_pages, rows, indices, strict=False):
            if random.random() < 0.8 and 0 <= row < num_rows and 0 <= index < most_pages:
                table[row, index] = page
        if by_token:
            shifts = random.choice([0, 0, 0, 1], table.shape)[:, :, None]
            table = (table[:, :, None] * page_size + shifts + np.arange(page_size)).reshape(num_rows, -1)
        width = most_pages * page_size if by_token else most_pages
        entries = torch.zeros((num_rows, width + 5), dtype=torch.int32 if by_token else torch.int64, device=device)
        entries[:, :width] = torch.from_numpy(table)
        batch = numbers([*random.integers(0, num_rows, 3), -1, num_rows], device)
        lengths = numbers(random.integers(0, (most_pages + 1) * page_size + 1, 5), device, torch.int32)
        firsts = numbers(random.integers(-1, most_pages + 2, 5), device) if has_firsts else None
        both.run(
            "check_pages",
            entries[:, : width - (seed % 2 if width > 1 else 0)],
            batch,
            lengths,
            firsts,
            page_size=page_size,
            by_token=by_token,
            most_pages=most_pages,
            step=step,
            null_page=null_page,
            captured=True,
        )
        both.run("release_pages", numbers(some_pages[::3], device), first_generation=7, step=step)
        both.run("check_captured", batch, most_pages=most_pages, step=step)
        slots = [numbers(one, device) for one in stores_of(random, some_pages, places, page_size)]
        for part in (slice(0, 32), slice(32, None)):  # a hole that one program leaves another may see or not
            stored = [one[part] for one in slots]
            both.run("check_writes", *stored, page_size=page_size, step=step, null_page=null_page)


def stores_of(random, pages, places, page_size):
    """Slots, rows and positions: most tokens go where their row was granted, some anywhere, some are padding.

    Those of the first program go to even pages, others to odd ones: what one program spoils another may see or not.
    """
    parity = np.arange(40) >= 32
    known = pages[: len(places)]
    chosen = np.array([random.choice(np.flatnonzero(known % 2 == odd)) for odd in parity])
    within = random.integers(0, page_size, 40)
    slots = pages[chosen] * page_size + within
    positions = places[chosen, 1] * page_size + within
    rows = places[chosen, 0]
    for one, low, high in ((slots, -3, pages.max() * page_size + 9), (rows, -1, 5), (positions, -3, 99)):
        is_other = random.random(40) < 0.1
        one[is_other] = random.integers(low, high, is_other.sum())
    slots += ((slots // page_size) % 2 != parity) * page_size
    return slots, rows, positions
