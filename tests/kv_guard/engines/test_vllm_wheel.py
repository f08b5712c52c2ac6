"""What only a real vLLM can say: that all targets are as the table has them, both model runners' too."""

import dataclasses
import importlib
import inspect
import os
import random
import warnings
from types import SimpleNamespace

import pytest
import torch

from quantkit.kv_guard.engines.targets import check_targets, check_version
from quantkit.kv_guard.engines.vllm import runners, targets
from quantkit.kv_guard.engines.vllm.events import EVENTS, StepReport
from quantkit.kv_guard.engines.vllm.gather import ReportGatherer
from quantkit.kv_guard.engines.vllm.reports import GuardedOutput

pytestmark = [
    pytest.mark.skipif("QUANTKIT_VLLM" not in os.environ, reason="QUANTKIT_VLLM names no vLLM"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def imports_of_the_wheel():
    from tests.kv_guard.engines.small_vllm import wheel  # noqa: F401


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("windows", [(None,), (6,)])
def test_speculation_passes(monkeypatch, v2, windows):
    """Drafts that are refused are written over; their pages stay the request's."""
    from tests.kv_guard.engines.small_vllm import harness, wheel

    outputs, rng = imported("vllm.v1.outputs"), random.Random(3)
    harness.environment(monkeypatch, "abort")
    with harness.miniature_installed(only_workers=True):
        engine = wheel.WheelEngine(v2=v2, windows=windows, num_blocks=26, num_drafts=3)
        for number in range(8):
            engine.add(f"r{number}", [*range(9), number % 3], max_tokens=12)
        num_drafted = 0
        while engine.scheduler.has_requests():
            engine.step()
            drafts = {}
            for request in engine.scheduler.running:
                right = engine.right_tokens(request.request_id, request.num_output_tokens + 3)[-3:]
                wrong_from = rng.randrange(4)
                drafts[request.request_id] = right[:wrong_from] + [5] * (3 - wrong_from)
            num_drafted += len(drafts)
            engine.scheduler.update_draft_token_ids(outputs.DraftTokenIds(list(drafts), list(drafts.values())))
    assert num_drafted > 20
    assert engine.num_violations() == 0
    assert all(engine.is_right(name) and len(engine.released[name]) == 12 for name in engine.prompts)


def imported(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def test_its_targets_are_those_of_the_table():
    from tests.kv_guard.engines.small_vllm import harness

    check_version(imported("vllm").__version__, targets.SUPPORTED)
    check_targets(harness.TARGETS, targets.SUPPORTED)


def test_its_executors_wait_for_a_guarded_result():
    outputs = imported("vllm.v1.outputs")
    outputs.AsyncModelRunnerOutput.register(GuardedOutput)
    empty = outputs.EMPTY_MODEL_RUNNER_OUTPUT
    result = GuardedOutput(empty, lambda: StepReport(ended=("r1",)))
    assert isinstance(result, outputs.ModelRunnerOutput | outputs.AsyncModelRunnerOutput)
    assert getattr(result.get_output(), EVENTS).ended == ("r1",)
    assert not hasattr(empty, EVENTS)


def test_its_aggregator_keeps_what_the_ranks_report():
    outputs = imported("vllm.v1.outputs")
    aggregator = imported("vllm.distributed.kv_transfer.kv_connector.utils").KVOutputAggregator(2)
    answers = [outputs.ModelRunnerOutput(["a"], {"a": 0}) for _ in range(2)]
    for number, answer in enumerate(answers):
        setattr(answer, EVENTS, StepReport(ended=(f"r{number}",)))
    gathered = ReportGatherer(aggregator).aggregate(answers, 1)
    assert getattr(gathered, EVENTS).ended == ("r0", "r1")


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("vllm.v1.worker.gpu_model_runner", runners.COMMON + runners.ONLY_V1),
        ("vllm.v1.worker.gpu.model_runner", runners.COMMON + runners.ONLY_V2),
    ],
)
def test_its_runners_have_what_is_read_of_them(module, names):
    source = inspect.getsource(imported(module).GPUModelRunner)
    for name in names:
        first = name.partition(".")[0]
        assert f"self.{first} = " in source or f"self.{first}: " in source, name


def test_a_batch_of_v2_has_what_is_read_of_it():
    fields = {field.name for field in dataclasses.fields(imported("vllm.v1.worker.gpu.input_batch").InputBatch)}
    assert {"req_ids", "num_reqs", "num_tokens", "seq_lens", "query_start_loc", "positions"} <= fields
    assert "seq_lens_cpu_upper_bound" in fields


def test_a_batch_of_v1_is_read_from_its_own_tables():
    tables = imported("vllm.v1.worker.block_table")
    buffers = imported("vllm.v1.utils")
    device = torch.device("cpu")
    table = object.__new__(tables.BlockTable)
    table.block_table = buffers.CpuGpuBuffer(4, 6, dtype=torch.int32, device=device, pin_memory=False)
    table.slot_mapping = buffers.CpuGpuBuffer(16, dtype=torch.int64, device=device, pin_memory=False)
    table.num_blocks_per_row = torch.zeros(4, dtype=torch.int32).numpy()
    table.add_row([5, 6], 0)
    table.add_row([7], 1)
    table.block_table.gpu.copy_(table.block_table.cpu)  # as `commit_block_table` does on a device
    starts = buffers.CpuGpuBuffer(5, dtype=torch.int32, device=device, pin_memory=False)
    starts.np[:] = [0, 2, 5, 5, 5]
    starts.gpu.copy_(starts.cpu)
    lengths = torch.tensor([6, 3, 0, 0], dtype=torch.int32)
    batch = runners.batch_of_v1(
        SimpleNamespace(
            input_batch=SimpleNamespace(req_ids=["a", "b"], block_table=[table]),
            kv_cache_config=SimpleNamespace(kv_cache_groups=[None]),
            query_start_loc=starts,
            seq_lens=lengths,
            optimistic_seq_lens_cpu=lengths,
            positions=torch.arange(16),
        )
    )
    assert (batch.requests, batch.most_tokens, len(batch.positions), len(batch.slots[0])) == (["a", "b"], 6, 5, 5)
    assert batch.tables[0][:, :2].tolist() == [[5, 6], [7, 0]]
    assert batch.starts.tolist() == [0, 2, 5]
