"""Requests of all kinds under the guard, where nothing is wrong: no violation, right tokens, no page lost."""

import random

import pytest

from quantkit.kv_guard.tracker import Mode

PROMPT = list(range(10, 23))  # three pages of four, and a token


def assert_clean(serving):
    metrics = serving.guard.pool.tracker.metrics
    assert (metrics.violations.total(), metrics.lost, serving.wrong(), serving.num_lost()) == (0, 0, [], 0)
    assert metrics.pages > 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_one_request(serve, page_size):
    serving = serve(page_size=page_size, num_pages=32)
    serving.finish(serving.submit("a", PROMPT, 9))
    assert serving.sent["a"] == serving.right("a", 9)
    assert serving.guard.pool.tracker.metrics.checks == 9
    assert_clean(serving)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_cached_prefix_is_read_by_others(serve, page_size):
    serving = serve(page_size=page_size, num_pages=64)
    serving.finish(serving.submit("a", PROMPT, 6))
    told = PROMPT + serving.sent["a"]
    requests = [serving.submit("b", [*PROMPT[:9], 77, 78]), serving.submit("c", [*told, 5])]
    launched = serving.prefill(*requests)
    assert launched[0].prefix_lens == ([9, 18] if page_size == 1 else [8, 16])
    serving.process(launched)
    serving.finish(*requests)
    assert_clean(serving)


def test_two_requests_of_one_prompt_at_once(serve):
    """Both compute it; one page is given back, and both read what the cache has."""
    serving = serve()
    requests = [serving.submit(rid, PROMPT) for rid in "ab"]
    serving.finish(*requests)
    assert_clean(serving)


def test_prefixes_under_different_names_are_different(serve):
    serving = serve()
    requests = [serving.submit(rid, PROMPT, extra_key=key) for rid, key in (("a", None), ("b", "lora"))]
    requests.append(serving.submit("c", PROMPT, cache_salt="tenant"))
    serving.finish(*requests)
    assert len(serving.guard.pool.kept) == 3 * 3 + 3
    assert_clean(serving)


def test_pages_are_evicted_and_used_again(serve):
    serving = serve(num_pages=10)
    for turn in range(12):
        serving.finish(serving.submit(f"r{turn}", [turn * 30 + place for place in range(14)], 5))
    serving.finish(serving.submit("again", [11 * 30 + place for place in range(14)], 5))
    assert_clean(serving)


def test_entries_of_evicted_prefixes_end(serve):
    serving = serve(num_pages=10)
    for turn in range(60):
        serving.finish(serving.submit(f"r{turn}", [turn * 30 + place for place in range(14)], 5))
    assert 0 < len(serving.guard.pool.kept) < 20
    assert_clean(serving)


def test_a_prompt_in_chunks(serve):
    serving = serve(overlap=True)
    req, short = serving.submit("long", list(range(40, 64))), serving.submit("short", PROMPT)
    checkpoint = serving.checkpoint
    launched = serving.prefill(req, chunk=8)
    checkpoint(req)  # while it runs, as the scheduler does
    behind = serving.prefill(req, short, chunk=13)
    serving.process(launched)
    checkpoint(req)
    last = serving.prefill(req)
    serving.process(behind)
    serving.process(last)
    serving.finish(req, short)
    assert_clean(serving)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_chunk_and_running_requests_in_one_batch(serve, page_size):
    serving = serve(page_size=page_size, num_pages=80)
    long, running = serving.submit("long", list(range(40, 64)), 3), serving.submit("a", PROMPT, 9)
    serving.step(running)
    for chunk in (8, 12, None):
        serving.process(serving.mix(long, running, chunk=chunk))
        if chunk:
            serving.checkpoint(long)
    serving.finish(long, running)
    assert len(serving.sent["a"]) == 9
    assert_clean(serving)


def test_steps_that_overlap(serve):
    """A request ends while the next step still runs it; its pages are freed, and granted anew, meanwhile."""
    serving = serve(overlap=True, num_pages=12)
    first, second = serving.submit("first", PROMPT, 2), serving.submit("second", PROMPT[:5], 12)
    launched = serving.prefill(first, second)
    behind = serving.decode(first, second, behind=launched)
    serving.process(launched)
    serving.before_compute.append(lambda: serving.process(behind))
    running = serving.decode(first, second, behind=behind)
    serving.before_compute.clear()
    assert first.finished()  # while the step ran, which is past its end
    other = serving.submit("other", [200 + place for place in range(14)])
    launched = serving.prefill(other)
    serving.process(running)
    serving.process(launched)
    serving.finish(second, other)
    assert_clean(serving)


def test_a_request_that_is_retracted_begins_anew(serve):
    serving = serve()
    req, other = serving.submit("a", PROMPT, 8), serving.submit("b", PROMPT[:6], 8)
    serving.step(req, other)
    serving.step(req, other)
    serving.retract(req)
    serving.finish(other)
    serving.step(req)
    serving.finish(req)
    assert_clean(serving)


def test_a_flush(serve):
    serving = serve()
    serving.finish(serving.submit("a", PROMPT))
    serving.flush()
    assert len(serving.guard.pool.kept) == 0
    serving.finish(serving.submit("b", PROMPT))
    assert_clean(serving)


@pytest.mark.parametrize("page_size", [1, 4])
def test_speculation(serve, page_size):
    """Pages are reserved ahead, prefixes are found by pairs of tokens, a step stores tokens that are refused."""
    serving = serve(eagle=True, page_size=page_size, num_pages=80)
    for turn in range(3):
        requests = [serving.submit(f"{rid}{turn}", PROMPT + [turn] * (rid == "b"), 7) for rid in "ab"]
        serving.step(*requests)
        while alive := [req for req in requests if not req.finished()]:
            serving.process(serving.speculate(*alive))
    assert requests[0].kv.req_pool_idx is None
    assert_clean(serving)


def test_prefixes_of_pairs_that_differ_behind_their_last_page(serve):
    """Such caches have a page for each token that follows."""
    serving = serve(eagle=True, num_pages=60)
    for rid, prompt in (("a", PROMPT), ("b", [*PROMPT[:4], 99, 98, 97]), ("c", PROMPT)):
        req = serving.submit(rid, prompt, 3)
        serving.step(req)
        while not req.finished():
            serving.process(serving.speculate(req))
    assert_clean(serving)


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_cache_is_off(serve, page_size):
    serving = serve(disable_radix_cache=True, page_size=page_size, num_pages=40)
    for rid in "ab":
        serving.finish(serving.submit(rid, PROMPT))
    assert_clean(serving)


@pytest.mark.parametrize("seed", range(4))
def test_mixed_traffic(serve, seed):
    draw = random.Random(seed)
    serving = serve(num_pages=30, context=48, page_size=draw.choice([1, 4]) if seed else 4)
    prompts = [[draw.randrange(500) for _ in range(draw.randrange(3, 20))] for _ in range(5)]
    running, turn = [], 0
    for _ in range(120):
        free = serving.allocator.available_size() + serving.tree.evictable_size()
        if len(running) < 3 and free > 16 * (len(running) + 1):
            start = draw.choice(prompts)[: draw.randrange(2, 20)]
            req = serving.submit(
                f"r{turn}", start + [draw.randrange(500) for _ in range(draw.randrange(4))], draw.randrange(1, 6)
            )
            turn += 1
            serving.step(req)
            running.append(req)
        elif running:
            serving.step(*running)
            if draw.random() < 0.1 and not running[0].finished():
                serving.retract(running[0])
                serving.finish(*running[1:])
                running = running[:1]
                serving.step(*running)
        running = [req for req in running if not req.finished()]
        if not running and draw.random() < 0.05:
            serving.flush()
    serving.finish(*running)
    assert turn > 20
    assert_clean(serving)


def test_a_guard_that_logs_changes_nothing(serve):
    serving = serve(mode=Mode.LOG)
    serving.finish(serving.submit("a", PROMPT))
    assert_clean(serving)
