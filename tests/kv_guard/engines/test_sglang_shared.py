"""Pages that the cache has, or that a prompt in chunks has given it: stolen, freed, written to."""

from tests.kv_guard.engines.test_sglang_faults import OTHER, PROMPT, SIZE, assert_ended, ended, row, two_running


def test_a_cached_page_that_is_stolen(serve):
    """Kind 7: freed, and granted to another, while the cache has it."""
    serving = serve()
    serving.finish(serving.submit("a", PROMPT, 1))
    node = serving.submit("probe", PROMPT)
    node.init_next_round_input(serving.tree)
    page = serving.tree.path_device_indices(node.last_node)[4:8]
    serving.allocator.free_segment(page, start_pos=0)
    thief = serving.submit("thief", OTHER[:3], 5)
    serving.step(thief)
    assert int(row(serving, thief)[0] // SIZE) == int(page[0] // SIZE)
    reader = serving.submit("reader", PROMPT, 3)
    serving.step(reader)
    assert serving.sent["reader"] == []
    serving.finish(thief)
    assert ended(serving) == {"reader"}
    assert serving.wrong() == []


def test_pages_of_a_prompt_in_chunks_that_are_freed_while_it_runs(serve):
    """Kind 8: the cache has its first chunk, and it is given up with the request."""
    serving = serve(overlap=True)
    req = serving.submit("long", list(range(40, 64)), 2)
    launched = serving.prefill(req, chunk=8)
    serving.checkpoint(req)
    serving.process(launched)
    first = row(serving, req)[:8].clone()
    serving.allocator.free_segment(first, start_pos=0)
    thief = serving.submit("thief", OTHER[:3], 2)
    serving.step(thief)
    last = serving.prefill(req)
    serving.process(last)
    assert serving.sent["long"] == []
    assert "long" in ended(serving)
    assert serving.wrong() == []


def test_a_prompt_in_chunks_is_not_gone_on_with(serve):
    serving = serve(overlap=True)
    req = serving.submit("long", list(range(40, 64)), 2)
    serving.scheduler.chunked_req = req
    launched = serving.prefill(req, chunk=8)
    serving.checkpoint(req)
    serving.process(launched)
    row(serving, req)[:4] = 0
    serving.process(serving.prefill(req, chunk=8))
    assert serving.scheduler._pending_chunked_abort_req is req
    assert serving.sent["long"] == []


def test_a_cached_page_that_was_written_to_is_read_by_nobody(serve):
    serving, a, b = two_running(serve)
    serving.finish(a)
    probe = serving.submit("probe", PROMPT)
    probe.init_next_round_input(serving.tree)
    batch, _ = serving.decode(b, run=False)
    batch.out_cache_loc = serving.tree.path_device_indices(probe.last_node)[4:5]
    serving.process((batch, serving.scheduler.run_batch(batch)))
    serving.finish(serving.submit("c", PROMPT))
    assert_ended(serving, "b", "c")


def test_a_cancelled_speculation_that_frees_a_shared_prefix(serve):
    """Kind 9: what is undone is not the request's alone, and another reads it by then."""
    serving = serve(eagle=True, num_pages=60)
    for rid in ("first", "a"):
        req = serving.submit(rid, PROMPT, 8)
        serving.step(req)
        serving.process(serving.speculate(req))
    serving.allocator.free_segment(row(serving, req)[4:8], start_pos=0)
    thief = serving.submit("thief", OTHER[:3], 6)
    serving.step(thief)
    serving.process(serving.speculate(serving.reqs["first"], req))
    assert len(serving.sent["first"]) == len(serving.sent["a"]) == 3
    assert ended(serving) == {"first", "a"}
    assert serving.wrong() == []
