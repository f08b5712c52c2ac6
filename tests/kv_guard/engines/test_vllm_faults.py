"""Faults of vLLM's pages: who would have seen another's is ended before a wrong token leaves, and the others go on."""

import pytest
import torch

from quantkit.kv_guard.faults import Fault
from tests.kv_guard.engines.small_vllm.harness import PAGE_SIZE

BOTH_RUNNERS = pytest.mark.parametrize("v2", [True, False], ids=["v2", "v1"])
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def running(make, **settings):
    """Two requests that decode, with three pages each."""
    engine = make(**settings)
    engine.add("victim", range(10, 20), max_tokens=8)
    engine.add("other", range(40, 50), max_tokens=8)
    for _ in range(4):
        engine.step()
    assert len(engine.released["victim"]) >= 1
    return engine


def blocks_of(engine, name, group=0):
    return engine.scheduler.kv_cache_manager.coordinator.single_type_managers[group].req_to_blocks[name]


def rows_in_batch(runner):
    """Tables as the runner keeps them, by request."""
    if hasattr(runner, "req_states"):
        table = runner.block_tables.block_tables[0].gpu
        return {name: table[row] for name, row in runner.req_states.req_id_to_index.items()}
    table = runner.input_batch.block_table[0].block_table.cpu
    return {name: table[row] for row, name in enumerate(runner.input_batch.req_ids)}


def faults_of(engine):
    return {fault for tracker in engine.trackers for fault, count in tracker.metrics.violations.items() if count}


def check_outcome(engine, *, ended=("victim",)):
    """Nothing wrong left, who is named is ended as an error, the others came to their end."""
    engine.run()
    assert all(engine.is_right(name) for name in engine.prompts)
    assert {name for name in engine.prompts if engine.is_error(name)} == set(ended)
    assert all(len(engine.released[name]) >= 4 for name in set(engine.prompts) - set(ended))


@BOTH_RUNNERS
@DEPTHS
@pytest.mark.parametrize("entry", [0, 1])
def test_a_row_at_another_requests_intact_page(make, v2, depth, entry):
    engine = running(make, v2=v2, depth=depth)

    def disturb(runner):
        rows = rows_in_batch(runner)
        if len(rows) == 2:
            rows["victim"][entry] = rows["other"][entry]

    engine.runners[0].before_forward = disturb
    check_outcome(engine)
    assert Fault.OTHER_OWNER in faults_of(engine)


@BOTH_RUNNERS
def test_a_row_that_is_shifted_by_a_page(make, v2):
    engine = running(make, v2=v2)

    def disturb(runner):
        rows = rows_in_batch(runner)
        if "victim" in rows:
            rows["victim"][:2] = rows["victim"][:2].flip(0)

    engine.runners[0].before_forward = disturb
    check_outcome(engine)


@BOTH_RUNNERS
@DEPTHS
def test_a_page_that_is_released_while_its_request_runs(make, v2, depth):
    """Seen before anybody else gets it; a page of the prefix cache is another's only when it is handed out anew."""
    engine = running(make, v2=v2, depth=depth, caching=False)
    engine.scheduler.kv_cache_manager.block_pool.free_blocks([blocks_of(engine, "victim")[0]])
    for _ in range(depth):
        engine.step()
    assert engine.is_error("victim")
    assert engine.is_right("victim")
    assert faults_of(engine) & {Fault.FREED, Fault.OTHER_OWNER}


@BOTH_RUNNERS
def test_a_page_that_is_handed_out_while_its_request_runs(make, v2):
    """It stands in the free queue a second time: its new holder shares it with the old one."""
    engine = running(make, v2=v2)
    engine.step()
    block, pool = blocks_of(engine, "victim")[0], engine.scheduler.kv_cache_manager.block_pool
    pool._maybe_evict_cached_block(block)
    block.ref_cnt = 0
    pool.free_block_queue.prepend_n([block])
    engine.add("thief", range(70, 79), max_tokens=4)
    engine.step()
    assert engine.is_error("victim")
    assert engine.is_right("victim")
    assert {Fault.GRANTED_TWICE, Fault.OTHER_OWNER} <= faults_of(engine)


@BOTH_RUNNERS
def test_a_shared_page_that_is_given_up_for_both(make, v2):
    """By a request that leaves: the page goes on in the cache, where the other reads it, until it is handed out."""
    engine = make(v2=v2, num_blocks=12)
    engine.add("first", range(9), max_tokens=8)
    for _ in range(3):
        engine.step()
    engine.add("victim", [*range(8), 80], max_tokens=20)
    engine.step()
    shared = blocks_of(engine, "victim")[1]
    assert shared.ref_cnt == 2
    engine.scheduler.kv_cache_manager.block_pool.free_blocks([shared])
    while "first" in engine.scheduler.requests:
        engine.step()
    assert (shared.ref_cnt, engine.num_violations()) == (0, 0)
    engine.add("thief", range(50, 74), max_tokens=4)
    engine.run()
    assert engine.is_error("victim")
    assert all(engine.is_right(name) for name in engine.prompts)
    assert faults_of(engine) & {Fault.FREED, Fault.OTHER_OWNER}


@BOTH_RUNNERS
def test_a_cached_page_that_is_stolen_between_look_up_and_use(make, v2):
    """The look-up pins nothing; what runs in between takes the pages for itself."""
    engine = make(v2=v2, num_blocks=12)
    for name, start in (("first", 0), ("second", 30)):
        engine.add(name, range(start, start + 12), max_tokens=4)
        engine.run()
    manager = engine.scheduler.kv_cache_manager
    look_up = manager.get_computed_blocks

    def look_up_and_lose(request, *rest):
        found = look_up(request, *rest)
        if request.request_id == "victim":
            manager.get_computed_blocks = look_up
            thief = engine.make_request("thief", range(50, 74), 4)
            assert manager.allocate_slots(thief, 24) is not None
            assert found[0].blocks[0][-1].ref_cnt == 1
        return found

    manager.get_computed_blocks = look_up_and_lose
    engine.add("victim", [*range(12), 90], max_tokens=4)
    engine.step()
    assert engine.is_error("victim")
    assert not engine.released["victim"]


def test_a_hit_on_a_page_of_another_prefix(make):
    """As a look-up would that is a page too long, or whose key says too little."""
    engine = make()
    for name, start in (("a", 0), ("b", 60)):
        engine.add(name, range(start, start + 9), max_tokens=4)
        engine.run()
    manager = engine.scheduler.kv_cache_manager
    look_up = manager.get_computed_blocks
    wrong = look_up(engine.make_request("b", range(60, 69), 4))[0].blocks[0][1]

    def look_up_wrongly(request, *rest):
        found = look_up(request, *rest)
        found[0].blocks[0][1] = wrong
        return found

    manager.get_computed_blocks = look_up_wrongly
    engine.add("victim", range(12), max_tokens=4)
    check_outcome(engine)
    assert Fault.OTHER_OWNER in faults_of(engine)


@BOTH_RUNNERS
@DEPTHS
def test_a_window_that_is_pruned_too_early(make, v2, depth):
    """Pages that the step still reads are released, and may be handed out to another in the same step."""
    engine = make(v2=v2, depth=depth, windows=(6,), caching=False)
    engine.add("victim", range(10, 20), max_tokens=8)
    engine.add("other", range(40, 50), max_tokens=8)
    for _ in range(4):
        engine.step()
    side = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    prune = side.remove_skipped_blocks

    def prune_too_much(name, num_tokens, *rest):
        prune(name, num_tokens + 5 if name == "victim" else num_tokens, *rest)

    side.remove_skipped_blocks = prune_too_much
    check_outcome(engine)
    assert faults_of(engine) & {Fault.FREED, Fault.OTHER_OWNER}


@BOTH_RUNNERS
@pytest.mark.parametrize("window", [5, 6, 8, 9])
def test_a_null_page_within_a_window(make, v2, window):
    """A hit that is too short by a page: what attention reads there is nobody's; in front of the window it is right."""
    engine = make(v2=v2, windows=(window,))
    engine.add("first", range(17), max_tokens=4)
    engine.run()
    manager, first = engine.scheduler.kv_cache_manager, (16 - window + 1) // PAGE_SIZE
    look_up = manager.get_computed_blocks

    def look_up_less(request, *rest):
        found = look_up(request, *rest)
        assert (len(found[0].blocks[0]), found[1]) == (4, 16)
        if request.request_id == "victim":
            found[0].blocks[0][first] = manager.block_pool.null_block
        return found

    manager.get_computed_blocks = look_up_less
    engine.add("hit", [*range(16), 50], max_tokens=4)
    engine.add("victim", [*range(16), 60], max_tokens=4)
    check_outcome(engine)
    assert faults_of(engine) == {Fault.NEVER_GRANTED}


@BOTH_RUNNERS
@pytest.mark.parametrize("shift", ["a page", "a place"])
def test_a_token_that_would_be_stored_elsewhere(make, v2, shift):
    """In a page of its own or of another's; both holders are ended, for that page is spoiled."""
    engine = running(make, v2=v2)
    runner = engine.runners[0]

    def disturb(tables, slots):
        mine, others = (blocks_of(engine, name)[-1].block_id for name in ("victim", "other"))
        for number, slot in enumerate(slots[0].tolist()):
            if slot // PAGE_SIZE == mine and slot >= 0:
                away = (others - mine) * PAGE_SIZE if shift == "a page" else (1 if slot % PAGE_SIZE == 0 else -1)
                slots[0][number] = slot + away

    runner.laid_out = disturb
    engine.step()
    ended = {"a page": {"victim", "other"}, "a place": {"victim"}}[shift]
    assert {name for name in engine.ended if engine.is_error(name)} == ended
    assert engine.is_right("victim")
    assert engine.is_right("other")


@BOTH_RUNNERS
def test_the_new_holder_of_a_page_that_was_written_to_is_not_ended(make, v2):
    """Steps overlap: the page is released, and handed out anew, before the report of the write is read."""
    engine = running(make, v2=v2, depth=2, caching=False)
    runner, written = engine.runners[0], []

    def disturb(tables, slots):
        mine, others = (blocks_of(engine, name)[-1].block_id for name in ("victim", "other"))
        slots[0][slots[0] // PAGE_SIZE == mine] += (others - mine) * PAGE_SIZE
        written.append(others)

    runner.laid_out = disturb
    engine.step()
    runner.laid_out = lambda tables, slots: None
    assert not engine.ended
    engine.scheduler.finish_requests("other", engine.scheduler.requests["other"].status.FINISHED_ABORTED)
    engine.add("new", range(70, 79), max_tokens=5)
    engine.step()
    assert set(written) <= {block.block_id for block in blocks_of(engine, "new")}
    assert engine.is_error("victim")
    engine.run()
    assert {name for name in engine.ended if engine.is_error(name)} == {"victim"}
    assert engine.is_right("new")
    assert len(engine.released["new"]) == 5


@BOTH_RUNNERS
def test_a_cached_page_that_is_written(make, v2):
    engine = make(v2=v2)
    engine.add("first", range(9), max_tokens=6)
    for _ in range(3):
        engine.step()
    engine.add("victim", [*range(8), 80], max_tokens=6)
    shared = blocks_of(engine, "first")[1].block_id

    def disturb(tables, slots):
        for number, slot in enumerate(slots[0].tolist()):
            if "victim" in engine.scheduler.requests and slot >= 0 and slot % PAGE_SIZE == 0:
                slots[0][number] = shared * PAGE_SIZE

    engine.runners[0].laid_out = disturb
    engine.step()
    assert engine.is_error("victim")
    assert all(engine.is_right(name) for name in engine.prompts)


@BOTH_RUNNERS
def test_a_tag_that_is_overwritten_during_the_step(make, v2):
    """As a transfer does that lands in a page whose former holder it was meant for."""
    engine = running(make, v2=v2)
    tracker = engine.trackers[0]
    page = torch.tensor([blocks_of(engine, "victim")[1].block_id])
    foreign = torch.tensor([[1, 2, 3, 0]])
    engine.runners[0].in_forward = lambda runner: tracker.land(page, foreign)
    check_outcome(engine)
    assert "victim" in engine.ended


def test_a_cached_page_that_is_overwritten_is_read_once(make):
    """Who finds it is ended, and it goes out of the cache: the next one computes its own."""
    engine = make()
    engine.add("first", range(9), max_tokens=4)
    engine.run()
    page = engine.scheduler.kv_cache_manager.get_computed_blocks(engine.make_request("first", range(9), 4))[0].blocks[
        0
    ][1]
    engine.trackers[0].land(torch.tensor([page.block_id]), torch.tensor([[1, 2, 3, 0]]))
    for name in ("victim", "later"):
        engine.add(name, range(9), max_tokens=4)
        engine.run()
    check_outcome(engine)
    assert faults_of(engine) == {Fault.TORN}


def test_a_page_that_is_released_twice(make):
    engine = running(make)
    engine.run()
    block = next(
        block
        for block in engine.scheduler.kv_cache_manager.block_pool.blocks
        if block.block_hash is None and not block.is_null
    )
    engine.scheduler.kv_cache_manager.block_pool.free_blocks([block])
    block.ref_cnt = 0
    engine.add("next", range(5), max_tokens=3)
    engine.run()
    assert faults_of(engine) == {Fault.FREED_TWICE}
    assert engine.is_right("next")


@DEPTHS
def test_what_was_computed_from_a_bad_page_is_not_served(make, depth):
    """A follower has cached pages that the victim wrote while it read another's: ended too, and nobody finds them."""
    engine = make(depth=depth, chunk=8, num_blocks=40)
    prompt = list(range(10, 26))
    engine.add("other", range(40, 52), max_tokens=12)
    engine.step()
    engine.add("victim", prompt, max_tokens=6)
    before = {}

    def disturb(runner):
        rows = rows_in_batch(runner)
        if "victim" in rows and not before:
            before["page"] = int(rows["victim"][0])
            rows["victim"][0] = rows["other"][0]

    engine.step()
    engine.runners[0].before_forward = disturb
    engine.add("follower", [*prompt, 99], max_tokens=6)
    check_outcome(engine, ended=("victim", "follower"))
    engine.runners[0].before_forward = lambda runner: None
    hits = []
    look_up = engine.scheduler.kv_cache_manager.get_computed_blocks
    engine.scheduler.kv_cache_manager.get_computed_blocks = lambda *asked: hits.append(look_up(*asked)) or hits[-1]
    engine.add("later", prompt, max_tokens=6)
    engine.run()
    assert hits[0][1] < 16
    assert engine.is_right("later")
    assert not engine.is_error("later")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_that_one_rank_alone_sees(make, rank):
    engine = running(make, ranks=2)

    def disturb(runner):
        rows = rows_in_batch(runner)
        if len(rows) == 2:
            rows["victim"][0] = rows["other"][0]

    engine.runners[rank].before_forward = disturb
    check_outcome(engine)
