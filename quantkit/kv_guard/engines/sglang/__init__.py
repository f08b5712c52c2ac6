"""A plugin for SGLang 0.5.23 that guards its paged KV cache: tags on physical pages, checked around every step.

    QUANTKIT_KV_GUARD=abort sglang serve ...          # or off, log, halt, or the path of a JSON file (../settings.py)

SGLang loads it by the entry point `sglang.srt.plugins` in each of its processes; without the variable nothing else is
imported. What is hooked is compared with SGLang when the plugin is loaded, when the pools are made, and ahead of the
first step; a target that is missing, differs or is called past its hook, and whatever else the guard cannot go on with,
ends a server in mode abort or halt, and is said in the log in mode log, where the guard is off from then on
(../refusals.py; a transfer whose peer has no guard is refused in every mode). Nothing of SGLang is patched but through
its registry of hooks (targets.py: which, by which parameters, what for), and nothing of it is imported here.

**Which event is which call of the tracker.** A row is one of `req_to_token`, a page is `slot // page_size`.

| SGLang | tracker |
|---|---|
| `ReqToTokenPool.alloc`, `free_rows` (a decode server: `DecodeReqToTokenPool.alloc`, `free`) | open, close |
| `alloc_for_extend`, `alloc_for_decode`, `alloc_for_spec_decode`, `_pre_alloc` | grant of the pages that begin there |
| `_pre_alloc`, but for a warm-up | announce (transfers.py) |
| `_release_page_ids`, where all ways of freeing a page end (`free` of single slots) | release |
| `UnifiedRadixCache.insert` within a checkpoint: pages behind what the tree had | cache; the answer is kept |
| the same: pages that the tree had, which the request reads from then on | share, of what was kept |
| `alloc_for_extend`, `_pre_alloc` of a request that begins with a cached prefix | share, of what was kept |
| `_commit_transfer_to_req` | land, arrive |
| `_release_request`, where SGLang knows that nothing is on its way; `restore_kv_cache` | drained |
| `backup_kv_cache` of a decode server: a request goes to the host | holds; its tags stay here |
| `clear` | clear |
| `ModelRunner.forward` under `Scheduler.run_batch` | the events above, before_step, check_writes; after_step |
| `Scheduler.process_batch_result` | verdict |

Events wait for the next forward and are carried out on its stream (events.py): no hook waits for the device, and what
they need of lengths and tokens the host has. `move`, `fork` and `truncate` have no event: a request's pages stay where
they are, rows are not forked (beams are refused), and speculation gives back what it reserved with the row.

**What is kept of a cached page** lies beside the tree, under the digest of its prefix (kept_pages.py), since the nodes
of the tree, which is Rust by default, are numbers. A prefix hit expects what was kept when the page was cached,
whatever lies there by now; a hit that nothing was kept for expects nothing, and is a violation.

**When a fault is seen**, with its kind in the taxonomy. Before a step is before it reads, behind it before its tokens
are sent; tests/kv_guard/engines/test_sglang_kinds.py has the tests of each row.

| fault | seen |
|---|---|
| late transfer (1) | as its pages are released too soon, for who has them next; else behind the step that reads them |
| another's pages land, or none (1, 13) | before the request's first step; the other server's token is sent |
| step ahead of its transfer (13) | before that step |
| page refilled in a step (2) | behind that step |
| window (3) | not: models with windows are refused |
| stale or mixed row (4) | before the step |
| double free (6) | as it is freed; two owners as it is granted, and before either's step |
| stolen prefix (7) | before the step |
| freed by retraction, or in chunks (8) | before the step |
| retracted with another's page (8) | as it leaves; its request is ended when it comes back |
| cancelled speculation (9) | before the step |
| off by one (10) | before the step, by pages and within one: its first token must be in its first slot |
| padding, or a token beside its place (11) | before the step; who reads that page is ended, too |
| torn tag (13) | behind the step |
| torn or flipped content (13) | not: nothing of it is looked at |
| host page reused (14) | not: host tiers are refused |
| fork | not: beams are refused |

In mode abort a request that is found wrong is finished without the token of that step (aborts.py), its row is mended
before it is given back, and nothing of it enters the cache; the others go on. A step that reads or
writes for a row which is nobody's, and a violation that the ring had no room for, end all requests of the batch.

**Ranks.** Each rank of tensor parallelism has tags of its own and may see a fault alone. In mode abort the ranks that
run one batch (`get_dp_tp_group`) reduce a flag a request by its maximum, on the CPU, before its tokens are processed:
what one rank found all ranks end, in the same step. A group of one reduces nothing. In mode halt a rank that raises
ends the server, in mode log none has to agree.

**Disaggregated serving.** Tags are two more buffers behind those of the layers, which Mooncake and NIXL pair by their
order. Owner and place are compared where they arrive, generations are local. A prefill server whose peer has another
number of buffers, which does not run the guard, ends the transfer (`get_mla_kv_ptrs_with_pp`); a decode server whose
peer sends no tags ends every request. Both must be given the same model, or the same `model` in the settings. What a
retraction takes to the host is checked as it leaves, and lies there without tags.

**Hooked, and tested on the miniature and on the wheel's own classes**: the radix cache in both of its forms,
retraction and preemption, chunked prefill, prompts and running requests in one batch (--enable-mixed-chunk),
overlapped steps, EAGLE and MTP, prefill and decode servers.

**Refused at start**, by the name of the server's argument where it has one (supported.py): host tiers
(--enable-hierarchical-cache, --enable-lmcache, --enable-flexkv, external linkers), sliding windows but with
--disable-hybrid-swa-memory, other --speculative-algorithm than EAGLE and EAGLE3, --enable-unified-memory,
--enable-hisparse, --pp-size, --attn-cp-size, --dcp-size, --enable-pdmux, --dllm-algorithm, sessions, --enable-mis,
--is-embedding, --decoupled-spec-role, encoder-decoder models; of a prefill or decode server also other pools than MLA
and DSA, other transports, --disaggregation-enable-kv-checksum, --enable-lora, a retraction into the host pool.
Allocators, pools of rows and prefix caches that are not known, Mamba's and the NPU's among them, are refused by their
class. Requests for beams are answered with an error.

**Not covered.** A draft model reads the same pages, but only the target's steps are checked, which are those whose
tokens are sent. A token in page 0 counts as padding where its row was granted nothing. The content of pages is not
looked at. What a request has computed from pages that were not its own, and the cache took before the verdict was read
(readers.py), stays in the cache and ends each request that hits it, as a page with a hole does, until it is evicted.
"""
