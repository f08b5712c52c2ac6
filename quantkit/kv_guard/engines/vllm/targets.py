"""What the guard hooks into in vLLM 0.33, and what it makes of it: read in the source of 0.33.0, compared at start."""

from quantkit.kv_guard.engines.targets import Supported, Target

SUPPORTED = Supported("vLLM", ("0.33.*",))

_CORE = "vllm.v1.core"
_SCHEDULER = f"{_CORE}.sched.scheduler.Scheduler"
_POOL = f"{_CORE}.block_pool.BlockPool"
_MANAGER = f"{_CORE}.kv_cache_manager.KVCacheManager"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
_RUNNERS = (_RUNNER_V1, _RUNNER_V2)

# through these a process comes to its part, after plugins were loaded in it, or in the process that it was forked from
GET_SCHEDULER = Target(
    name="vllm.config.scheduler.SchedulerConfig.get_scheduler_cls",
    purpose="tells an engine core its scheduler",
    parameters="self",
)
INIT_DEVICE = Target(
    name="vllm.v1.worker.worker_base.WorkerWrapperBase.init_device",
    purpose="makes a worker's model runner",
    parameters="self",
)
DOORS = (GET_SCHEDULER, INIT_DEVICE)

INIT_SCHEDULER = Target(
    name=f"{_SCHEDULER}.__init__",
    purpose="makes the block pool",
    parameters=(
        "self, vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size=, "
        "mm_registry=, include_finished_set=, log_stats="
    ),
)
SCHEDULE = Target(
    name=f"{_SCHEDULER}.schedule",
    purpose="makes what is sent to workers for a step",
    parameters="self, throttle_prefills=",
)
UPDATE_FROM_OUTPUT = Target(
    name=f"{_SCHEDULER}.update_from_output",
    purpose="releases the tokens of a step",
    parameters="self, scheduler_output, model_runner_output",
)
FINISH_REQUESTS = Target(
    name=f"{_SCHEDULER}.finish_requests",
    purpose="ends requests",
    parameters="self, request_ids, finished_status",
)
ALLOCATE_SLOTS = Target(
    name=f"{_MANAGER}.allocate_slots",
    purpose="gives a request pages",
    parameters=(
        "self, request, num_new_tokens, num_new_computed_tokens=, new_computed_blocks=, "
        "num_lookahead_tokens=, num_external_computed_tokens=, delay_cache_blocks=, num_encoder_tokens=, "
        "full_sequence_must_fit=, reserved_blocks=, has_scheduled_reqs=, skip_zeroing_group_ids="
    ),
)
FREE_REQUEST = Target(name=f"{_MANAGER}.free", purpose="takes a request's pages", parameters="self, request")
POP_BLOCKS = Target(
    name=f"{_MANAGER}.pop_blocks_for_free",
    purpose="takes a request's pages, to be released later",
    parameters="self, request",
)
EVICT_REQUESTED = Target(
    name=f"{_MANAGER}.evict_blocks", purpose="makes pages unreadable for others", parameters="self, block_ids"
)
GET_NEW_BLOCKS = Target(name=f"{_POOL}.get_new_blocks", purpose="hands out pages", parameters="self, num_blocks")
TOUCH = Target(name=f"{_POOL}.touch", purpose="takes cached pages into use", parameters="self, blocks")
FREE_BLOCKS = Target(name=f"{_POOL}.free_blocks", purpose="releases pages", parameters="self, ordered_blocks")
CACHE_FULL_BLOCKS = Target(
    name=f"{_POOL}.cache_full_blocks",
    purpose="makes pages readable for others",
    parameters=(
        "self, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask="
    ),
)
COLLECTIVE_RPC = Target(
    name="vllm.v1.executor.multiproc_executor.MultiprocExecutor.collective_rpc",
    purpose="collects what workers answer",
    parameters=(
        "self, method, timeout=, args=, kwargs=, non_block=, unique_reply_rank=, kv_output_aggregator=, "
        "ec_output_aggregator="
    ),
)
REQUEST_STATUS = Target(name="vllm.v1.request.RequestStatus.FINISHED_ERROR", purpose="says how a request ended")
ENGINE_OUTPUT = Target(
    name="vllm.v1.engine.EngineCoreOutput",
    purpose="tells a client of its request",
    given=("request_id", "new_token_ids", "finish_reason", "events", "trace_headers", "error"),
)
ENGINE_OUTPUTS = Target(
    name="vllm.v1.engine.EngineCoreOutputs",
    purpose="tells a client of its requests",
    given=("outputs",),
)
REQUEST_ERROR = Target(
    name="vllm.outputs.RequestError",
    purpose="says why a request ended",
    parameters="code, message, retryable=",
)
SCHEDULER_SIDE = (
    INIT_SCHEDULER,
    SCHEDULE,
    UPDATE_FROM_OUTPUT,
    FINISH_REQUESTS,
    ALLOCATE_SLOTS,
    FREE_REQUEST,
    POP_BLOCKS,
    EVICT_REQUESTED,
    GET_NEW_BLOCKS,
    TOUCH,
    FREE_BLOCKS,
    CACHE_FULL_BLOCKS,
    COLLECTIVE_RPC,
    REQUEST_STATUS,
    ENGINE_OUTPUT,
    ENGINE_OUTPUTS,
    REQUEST_ERROR,
)

INIT_CACHE_V1, INIT_CACHE_V2 = (
    Target(
        name=f"{runner}.initialize_kv_cache",
        purpose="makes a pool's memory",
        parameters="self, kv_cache_config, is_profiling=, kv_cache_allocation_context=",
    )
    for runner in _RUNNERS
)
EXECUTE_V1 = Target(
    name=f"{_RUNNER_V1}.execute_model",
    purpose="runs a step",
    parameters="self, scheduler_output, intermediate_tensors=",
)
EXECUTE_V2 = Target(
    name=f"{_RUNNER_V2}.execute_model",
    purpose="runs a step",
    parameters=(
        "self, scheduler_output, intermediate_tensors=, dummy_run=, skip_attn_for_dummy_run=, is_profile=, "
        "context_len=, valid_dummy_state_slots=, randomize_inputs="
    ),
)
PREPARE_V1 = Target(
    name=f"{_RUNNER_V1}._prepare_inputs",
    purpose="lays out what a step reads",
    parameters="self, scheduler_output, num_scheduled_tokens",
)
PREPARE_V2 = Target(
    name=f"{_RUNNER_V2}.prepare_attn", purpose="lays out what a step reads", parameters="self, input_batch"
)
SAMPLE_V1, SAMPLE_V2 = (
    Target(name=f"{runner}.sample_tokens", purpose="ends a step", parameters="self, grammar_output")
    for runner in _RUNNERS
)
POOL_V2 = Target(name=f"{_RUNNER_V2}.pool", purpose="ends a step of a model that embeds", parameters="self")
WARM_UP = Target(
    name="vllm.v1.worker.gpu_worker.Worker.compile_or_warm_up_model",
    purpose="runs steps that no scheduler made",
    parameters="self",
)
ASYNC_OUTPUT = Target(name="vllm.v1.outputs.AsyncModelRunnerOutput.register", purpose="is waited for by executors")
WORKER_SIDE = (
    INIT_CACHE_V1,
    INIT_CACHE_V2,
    EXECUTE_V1,
    EXECUTE_V2,
    PREPARE_V1,
    PREPARE_V2,
    SAMPLE_V1,
    SAMPLE_V2,
    POOL_V2,
    WARM_UP,
    ASYNC_OUTPUT,
)
