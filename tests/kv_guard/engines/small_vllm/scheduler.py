"""The scheduler of the miniature: what runs goes on, what waits is let in, the last is preempted for want of pages."""

from tests.kv_guard.engines.small_vllm.data import (
    CachedRequestData,
    EngineCoreOutput,
    EngineCoreOutputs,
    NewRequestData,
    RequestStatus,
    SchedulerOutput,
)
from tests.kv_guard.engines.small_vllm.pool import KVCacheManager


class SchedulerConfig:
    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, max_num_chunk_tokens: int):
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.long_prefill_token_threshold = max_num_chunk_tokens

    def get_scheduler_cls(self):
        return Scheduler


class Scheduler:
    def __init__(
        self,
        vllm_config,
        kv_cache_config,
        structured_output_manager,
        block_size,
        hash_block_size=None,
        mm_registry=None,
        include_finished_set=False,
        log_stats=False,
    ):
        self.vllm_config, self.kv_cache_config = vllm_config, kv_cache_config
        self.scheduler_config = vllm_config.scheduler_config
        self.use_v2_model_runner = vllm_config.use_v2_model_runner
        self.connector = None
        caching = vllm_config.cache_config.enable_prefix_caching
        self.kv_cache_manager = KVCacheManager(kv_cache_config, hash_block_size or block_size, caching)
        self.requests, self.waiting, self.running = {}, [], []
        self.finished_req_ids, self.preempted_req_ids = set(), set()

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def has_requests(self):
        return bool(self.waiting or self.running or self.finished_req_ids)

    def schedule(self, throttle_prefills=False):
        budget = self.scheduler_config.max_num_batched_tokens
        scheduled, new_blocks, fresh, resumed, goes_on = {}, {}, [], [], []
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_new = min(self._num_new(request), budget)
            if num_new <= 0:
                index += 1
                continue
            blocks = self._make_room(request, num_new)
            if blocks is None:
                break
            goes_on.append(request)
            scheduled[request.request_id], new_blocks[request.request_id] = num_new, blocks
            budget -= num_new
            index += 1
        while not self.preempted_req_ids and self.waiting and budget > 0:
            request = self.waiting[0]
            if request.num_stale_tokens or len(self.running) >= self.scheduler_config.max_num_seqs:
                break
            hits, num_hit, _ = self.kv_cache_manager.get_computed_blocks(request)
            num_new = min(self._limited(request.num_tokens - num_hit), budget)
            if self.kv_cache_manager.allocate_slots(request, num_new, num_hit, hits) is None:
                break
            self.waiting.pop(0)
            (fresh if request.status is RequestStatus.WAITING else resumed).append(request)
            self.running.append(request)
            request.status, request.num_computed_tokens = RequestStatus.RUNNING, num_hit
            scheduled[request.request_id] = num_new
            budget -= num_new
        output = self._output(scheduled, new_blocks, fresh, resumed, goes_on)
        for name, num_new in scheduled.items():
            request = self.requests[name]
            request.num_computed_tokens += num_new
            request.num_in_flight_tokens += num_new
            if request.num_computed_tokens >= request.num_tokens + request.num_output_placeholders:
                request.num_output_placeholders += 1
        self.finished_req_ids, self.preempted_req_ids = set(), set()
        return output

    def _num_new(self, request):
        num_ahead = request.num_output_tokens + request.num_output_placeholders
        if num_ahead >= request.max_tokens:
            return 0
        return self._limited(request.num_tokens + request.num_output_placeholders - request.num_computed_tokens)

    def _limited(self, num_new):
        return min(num_new, self.scheduler_config.long_prefill_token_threshold)

    def _make_room(self, request, num_new):
        while True:
            blocks = self.kv_cache_manager.allocate_slots(request, num_new)
            if blocks is not None:
                return blocks
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return None

    def _preempt(self, request):
        self.kv_cache_manager.free(request)
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        request.num_stale_tokens, request.num_output_placeholders = request.num_in_flight_tokens, 0
        self.waiting.insert(0, request)
        self.preempted_req_ids.add(request.request_id)

    def _output(self, scheduled, new_blocks, fresh, resumed, goes_on):
        begins = fresh + resumed if self.use_v2_model_runner else fresh
        again = [] if self.use_v2_model_runner else resumed
        ids = self.kv_cache_manager.block_ids
        return SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(
                    request.request_id,
                    request.all_token_ids[: request.num_prompt_tokens],
                    ids(request.request_id),
                    request.num_computed_tokens,
                    list(request.all_token_ids) if self.use_v2_model_runner else None,
                )
                for request in begins
            ],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[request.request_id for request in goes_on + again],
                resumed_req_ids={request.request_id for request in again},
                all_token_ids={request.request_id: list(request.all_token_ids) for request in again},
                new_block_ids=[
                    tuple([block.block_id for block in group] for group in new_blocks[request.request_id].blocks)
                    for request in goes_on
                ]
                + [ids(request.request_id) for request in again],
                num_computed_tokens=[request.num_computed_tokens for request in goes_on + again],
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_req_ids=self.finished_req_ids,
            preempted_req_ids=self.preempted_req_ids,
        )

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = {}
        for name, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(name)
            if request is None or request.is_finished():
                continue
            request.num_in_flight_tokens -= num_scheduled
            is_stale = request.num_stale_tokens > 0
            request.num_stale_tokens -= num_scheduled if is_stale else 0
            tokens = model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[name]]
            if not tokens:
                continue
            if not is_stale:
                request.num_output_placeholders -= len(tokens)
            request.append(tokens)
            if not is_stale and self.kv_cache_manager.enable_caching:
                self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens - request.num_in_flight_tokens)
            reason = None
            if request.num_output_tokens >= request.max_tokens:
                self.finish_requests(name, RequestStatus.FINISHED_LENGTH_CAPPED)
                reason = request.get_finished_reason()
            outputs.setdefault(request.client_index, []).append(EngineCoreOutput(name, tokens, reason))
        return {client: EngineCoreOutputs(of_client) for client, of_client in outputs.items()}

    def finish_requests(self, request_ids, finished_status):
        ended = []
        for name in [request_ids] if isinstance(request_ids, str) else request_ids:
            request = self.requests.pop(name, None)
            if request is None:
                continue
            self.running = [other for other in self.running if other is not request]
            self.waiting = [other for other in self.waiting if other is not request]
            request.status = finished_status
            self.kv_cache_manager.free(request)
            self.finished_req_ids.add(name)
            ended.append(request)
        return ended
