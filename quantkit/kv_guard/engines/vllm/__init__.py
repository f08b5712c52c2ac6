"""The guard as a plugin of vLLM 0.33 (`vllm.general_plugins`); `QUANTKIT_KV_GUARD` is read by ../settings.py.

With mode off, the default, nothing is imported or wrapped. Else two doors are: `get_scheduler_cls`, through which an
engine core comes to its scheduler, and `init_device`, through which a worker comes to its model runner. What is behind
a door is compared with targets.py, and wrapped, when somebody goes through: a front end imports neither.

Scheduler and workers are processes of their own. The scheduler sees what the allocator does, and draws generations and
owners; its `StepEvents` go to every worker as an attribute of the step's `SchedulerOutput`, pickled with it. A worker
does them in the order of the steps, on the stream of the model, before the step reads a page.

    vLLM                                                     tracker
    ------------------------------------------------------------------------------------------------------------
    a request's first step                                   open
    KVCacheManager.free, pop_blocks_for_free                 close: it ended, or was preempted
    BlockPool.get_new_blocks, then allocate_slots            grant; before it release, where the page was cached
    BlockPool.free_blocks, the last reference                release, unless the page stays in the prefix cache
    BlockPool.free_blocks, a reference too many              release again, which is a violation
    BlockPool.touch, then allocate_slots                     share: what was granted when the page was cached
    BlockPool.cache_full_blocks                              cache, a step later, when the page is written
    GPUModelRunner.prepare_attn (V2), _prepare_inputs (V1)   before_step, check_writes
    GPUModelRunner.execute_model, behind the forward         after_step
    get_output of the step's result                          verdict
    evict_blocks, reset_prefix_cache                         nothing: a page is released when it is handed out anew

Owners are keyed digests of vLLM's block hashes, which cover all tokens up to a page's end, adapter, images and salt; a
page that is granted before its tokens are known, or with prefix caching off, is one request's and index's. vLLM's hash
is taken as it is: two prompts that it cannot tell apart are one owner.

Which faults of paged caches are seen, and when (tests/kv_guard/engines/test_vllm_kinds.py names a test of each):

    1  late transfer           not seen: connectors move no tags
    2  refilled in a step      not seen where a connector loads; where the pool hands the page out: before the next step
    3  window                  before the step
    4  stale row               before the step
    6  double free             at the events before a step, and before it by whoever reads the page
    7  stolen prefix           before the step
    8  freed by retraction     before the step; of a cached page, before the step that runs when it was handed out anew
    9  cancelled speculation   on the write side, as a token that would go to a page that others read
    10 off by one              before the step
    11 padding                 before the step where it is read; on the write side where a token would go elsewhere
    -  host page reused        not seen: pages of other tiers are not tracked
    -  torn or bit flip        not seen: content is not looked at; an overwritten tag, before or behind the step
    -  fork                    on the write side: parallel samples are requests that share pages of the cache

What the guard cannot go on with ends a server in mode abort or halt; in mode log it is said once, and the guard of that
process is off (../refusals.py). Log, metrics, incidents and a dump of the pool are as SGLang's (../logbook.py).

Requests that a violation names are ended before their tokens are released (mode abort, scheduler.py); in mode halt a
worker raises, and vLLM ends the engine. Of several workers all answer each step (gather.py).

Not covered. With a connector, pages that are loaded are checked as others are, whatever came, and a cached page may be
written. Draft models read and write the same pages unchecked, and slots of what fills a batch up are not looked at.
Refused are context parallelism, Mamba, cross attention, chunked local attention, sinks, R-SWA, HiSparse, diffusion,
elastic expert parallelism, `external_launcher`, and schedulers with a `schedule` of their own. Full attention, MLA and
sliding windows are guarded, in one group or several, with a tracker each. None of this has run on a GPU: pool and
scheduler of 0.33.0 did, on a CPU, with workers of a miniature.
"""
