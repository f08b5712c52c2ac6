"""A plugin for SGLang 0.5.23 that guards its paged KV cache: tags on physical pages, checked around every step.

    QUANTKIT_KV_GUARD=abort sglang serve ...          # or off, log, halt, or the path of a JSON file (settings.py)

SGLang loads it by the entry point `sglang.srt.plugins` in each of its processes; without the variable nothing else is
imported. Nothing of SGLang is patched but through its registry of hooks (targets.py: which, by which parameters, what
for), and nothing of it is imported here.

**Which event is which call of the tracker.** A row is one of `req_to_token`, a page is `slot // page_size`.

| SGLang | tracker |
|---|---|
| `ReqToTokenPool.alloc`, `free_rows` (a decode server: `DecodeReqToTokenPool.alloc`, `free`) | open, close |
| `alloc_for_extend`, `alloc_for_decode`, `alloc_for_spec_decode`, `_pre_alloc` | grant of the pages that begin there |
| `_release_page_ids`, where all ways of freeing a page end (`free` of single slots) | release |
| `UnifiedRadixCache.insert` within a checkpoint: pages behind what the tree had | cache; the answer is kept |
| the same: pages that the tree had, which the request reads from then on | share, of what was kept |
| `alloc_for_extend`, `_pre_alloc` of a request that begins with a cached prefix | share, of what was kept |
| `_commit_transfer_to_req` | land, arrive (transfers.py) |
| `clear` | clear |
| `ModelRunner.forward` under `Scheduler.run_batch` | the events above, before_step, check_writes; after_step |
| `Scheduler.process_batch_result` | verdict |

Events wait for the next forward and are carried out on its stream (events.py): no hook waits for the device, and what
they need of lengths and tokens the host has. `move`, `fork` and `truncate` have no event: a request's pages stay where
they are, rows are not forked (beams are refused), and speculation gives back what it reserved with the row.

**What is kept of a cached page** lies beside the tree, under the digest of its prefix (kept_pages.py), since the nodes
of the tree, which is Rust by default, are numbers. A prefix hit expects what was kept when the page was cached,
whatever lies there by now; a hit that nothing was kept for expects nothing, and is a violation.

**When a fault is seen**, by the kinds of the taxonomy:

| kind | where |
|---|---|
| 4 stale or mixed row, 7 stolen, 8 freed while cached or in chunks, 10 shifted | before the step that would read it |
| 6 freed twice; two owners | as it is freed; as it is granted, and before either's step |
| 1, 2 a transfer lands in a page of others, or while a step reads it | behind that step, before its tokens are sent |
| 1 what landed is another's, or has not landed | with the request's first step; the other server's token is sent |
| 11 a token would go to another's page, or beside its place | before the step; who reads that page is ended, too |
| 3 window pages; 9 under speculation | models with windows are refused; 9 as 4, 6 and 8 |

In mode abort a request that is found wrong is finished without the token of that step (aborts.py), its row is mended
before it is given back, and nothing of it enters the cache; the others go on. A violation without a name, and one that
the ring had no room for, ends the whole batch. Ranks of one batch agree on whom to end.

**Not covered**, and refused at start: other allocators (window, Mamba, unified memory, HiSparse, interleaved pages,
NPU) and subclasses; HiCache, LMCache, FlexKV and external linkers; pipeline, context and decode-context parallelism;
split prefill; diffusion models; streaming sessions; encoder-decoder models; speculation other than EAGLE and MTP; in
disaggregated serving other pools than MLA and DSA, other transports than Mooncake and NIXL, checksums, adapters, and
different pipeline layouts. Requests for beams are answered with an error. A draft model reads the same pages, but
only the target's steps are checked, which are those whose tokens are sent. A token whose slot is 0 counts as padding.
The content of pages is not looked at. Both servers of a transfer must run the plugin for the same model; one alone
ends every request on the decode side.
"""
