"""An engine core's loop over a scheduler and workers that the plugin has hooked, with every released token recorded."""

import json
import sys
from collections import deque
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

from quantkit.kv_guard.engines.settings import VARIABLE
from quantkit.kv_guard.engines.vllm import plugin, targets
from quantkit.kv_guard.engines.vllm.wrapping import original_of
from tests.kv_guard.engines.small_vllm import data, runners, workers
from tests.kv_guard.engines.small_vllm import pool as core
from tests.kv_guard.engines.small_vllm import scheduler as scheduling

PAGE_SIZE = 4
TARGETS = targets.DOORS + targets.SCHEDULER_SIDE + targets.WORKER_SIDE
_PLACES = {
    "vllm": {"__version__": "0.33.0"},
    "vllm.config": {},
    "vllm.config.scheduler": {"SchedulerConfig": scheduling.SchedulerConfig},
    "vllm.outputs": {"RequestError": data.RequestError},
    "vllm.v1": {},
    "vllm.v1.core": {},
    "vllm.v1.core.block_pool": {"BlockPool": core.BlockPool},
    "vllm.v1.core.kv_cache_manager": {"KVCacheManager": core.KVCacheManager},
    "vllm.v1.core.sched": {},
    "vllm.v1.core.sched.scheduler": {"Scheduler": scheduling.Scheduler},
    "vllm.v1.engine": {"EngineCoreOutput": data.EngineCoreOutput, "EngineCoreOutputs": data.EngineCoreOutputs},
    "vllm.v1.executor": {},
    "vllm.v1.executor.multiproc_executor": {"MultiprocExecutor": workers.MultiprocExecutor},
    "vllm.v1.outputs": {"AsyncModelRunnerOutput": workers.AsyncModelRunnerOutput},
    "vllm.v1.request": {"RequestStatus": data.RequestStatus},
    "vllm.v1.worker": {},
    "vllm.v1.worker.gpu": {},
    "vllm.v1.worker.gpu.model_runner": {"GPUModelRunner": runners.RunnerV2},
    "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": runners.RunnerV1},
    "vllm.v1.worker.gpu_worker": {"Worker": workers.Worker},
    "vllm.v1.worker.worker_base": {"WorkerWrapperBase": workers.WorkerWrapperBase},
}
_OF_WORKERS = {
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.worker_base",
}


@contextmanager
def miniature_installed(*, only_workers=False):
    """Under vLLM's names; with ``only_workers`` beside the scheduler of a real one."""
    names = _OF_WORKERS if only_workers else set(_PLACES)
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(vars(before[name]) if before[name] is not None else {})
        vars(sys.modules[name]).update(_PLACES[name])
    try:
        yield
    finally:
        unhook()
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.__setitem__(name, module)


def unhook():
    for target in TARGETS:
        holder, _, leaf = target.name.rpartition(".")
        module_name = next((name for name in _prefixes(holder) if name in sys.modules), None)
        found = sys.modules.get(module_name)
        for part in holder[len(module_name or "") + 1 :].split(".") if module_name else []:
            found = getattr(found, part, None) if part else found
        original = original_of(getattr(found, leaf, None))
        if original is not None:
            setattr(found, leaf, original)


def _prefixes(name):
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def environment(monkeypatch, mode, path=None, **settings):
    """``settings`` go to a JSON file at ``path``."""
    if path is not None:
        path.write_text(json.dumps({"mode": mode} | settings, default=str))
    monkeypatch.setenv(VARIABLE, mode if path is None else str(path))


FullAttentionSpec = type("FullAttentionSpec", (SimpleNamespace,), {})
SlidingWindowSpec = type("SlidingWindowSpec", (SimpleNamespace,), {})
MambaSpec = type("MambaSpec", (SimpleNamespace,), {})


def spec_of(window, more=0):
    if window is None:
        return FullAttentionSpec(block_size=PAGE_SIZE, dtype="bf16")
    return SlidingWindowSpec(
        block_size=PAGE_SIZE, dtype="bf16", sliding_window=window, num_retained_tokens=window - 1 + more
    )


def config(
    *, v2=True, windows=(None,), more=0, num_blocks=24, max_seqs=4, chunk=7, caching=True, max_len=64, replica=0
):
    """Of engine and cache, as far as the miniature and the plugin ask for it. ``more``: tokens that a window's pages
    are kept for, and that attention does not read."""
    parallel = SimpleNamespace(
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        distributed_executor_backend="mp",
        enable_elastic_ep=False,
        rank=0,
        world_size=1,
        data_parallel_index=replica,
    )
    return SimpleNamespace(
        scheduler_config=scheduling.SchedulerConfig(max_seqs, 32, chunk),
        parallel_config=parallel,
        model_config=SimpleNamespace(model="tiny", revision=None, max_model_len=max_len, is_diffusion=False),
        cache_config=SimpleNamespace(enable_prefix_caching=caching, block_size=PAGE_SIZE),
        use_v2_model_runner=v2,
    ), SimpleNamespace(
        num_blocks=num_blocks,
        hisparse_host_num_blocks=None,
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec_of(window, more)) for window in windows],
    )


class Engine:
    """``depth`` steps are in work at once; ``ranks`` workers do each."""

    def __init__(self, *, depth=1, ranks=1, **settings):
        vllm_config, kv_cache_config = self.configs(depth=depth, **settings)
        plugin.register()
        workers.WorkerWrapperBase().init_device()
        self.vllm_config, self.kv_cache_config = vllm_config, kv_cache_config
        self.scheduler = self.make_scheduler(vllm_config, kv_cache_config)
        runner_class = runners.RunnerV2 if vllm_config.use_v2_model_runner else runners.RunnerV1
        self.runners = [runner_class(vllm_config) for _ in range(ranks)]
        for runner in self.runners:
            runner.initialize_kv_cache(kv_cache_config)
            workers.Worker(runner).compile_or_warm_up_model()
        self.executor = workers.MultiprocExecutor(self.runners)
        self.depth, self.queue = depth, deque()
        self.released, self.ended, self.prompts = {}, {}, {}

    def configs(self, depth, **settings):
        return config(**settings)

    def make_scheduler(self, vllm_config, kv_cache_config):
        scheduler_class = vllm_config.scheduler_config.get_scheduler_cls()
        return scheduler_class(vllm_config, kv_cache_config, None, PAGE_SIZE)

    def make_request(self, name, prompt, max_tokens):
        hashed = PAGE_SIZE if self.vllm_config.cache_config.enable_prefix_caching else None
        return data.Request(name, prompt, max_tokens, hashed)

    def add(self, name, prompt, max_tokens=6):
        self.prompts[name], self.released[name] = list(prompt), []
        self.scheduler.add_request(self.make_request(name, prompt, max_tokens))

    @property
    def trackers(self):
        return self.runners[0].quantkit_kv_guard.trackers

    def step(self):
        """As `EngineCore.step_with_batch_queue`."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.executor.run("execute_model", output)
            waits = output.total_num_scheduled_tokens > 0
            result = self.executor.run("sample_tokens", None, non_block=True) if waits else None
            self.queue.append((output, result))
        if self.queue and (len(self.queue) >= self.depth or not self.scheduler.has_requests()):
            output, result = self.queue.popleft()
            answer = workers.EMPTY_MODEL_RUNNER_OUTPUT if result is None else result()
            for of_client in self.scheduler.update_from_output(output, answer).values():
                for one in of_client.outputs:
                    self.released[one.request_id].extend(one.new_token_ids)
                    if one.finish_reason is not None:
                        self.ended[one.request_id] = one

    def run(self, most_steps=400):
        for _ in range(most_steps):
            if not self.queue and not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def is_right(self, name):
        """Are all tokens that left the engine those of a cache without a fault?"""
        return self.released[name] == self.right_tokens(name, len(self.released[name]))

    def right_tokens(self, name, count):
        tokens = list(self.prompts[name])
        for _ in range(count):
            read = []
            for group in self.kv_cache_config.kv_cache_groups:
                window = getattr(group.kv_cache_spec, "sliding_window", None)
                read += tokens if window is None else tokens[max(0, len(tokens) - window) :]
            tokens.append(workers.next_token(read))
        return tokens[len(self.prompts[name]) :]

    def is_error(self, name):
        return getattr(self.ended[name].error, "code", None) == "kv_cache_integrity"

    def num_violations(self):
        return sum(sum(tracker.metrics.violations.values()) for tracker in self.trackers)


def disturbed(*, pages=1, **settings):
    """A request whose row shows pages of another."""
    engine = Engine(**settings)
    engine.add("victim", range(10), max_tokens=8)
    engine.add("other", range(40, 50), max_tokens=8)
    for _ in range(4):
        engine.step()

    def disturb(runner):
        rows = runner.req_states.req_id_to_index
        if len(rows) == 2:
            table = runner.block_tables.block_tables[0].gpu
            table[rows["victim"], :pages] = table[rows["other"], :pages]

    engine.runners[0].before_forward = disturb
    return engine
