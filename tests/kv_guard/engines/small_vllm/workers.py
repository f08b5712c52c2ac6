"""The workers of the miniature: executor, worker and model, with a cache that really holds what tokens left in it.

The model is a sum: a position leaves its token in its slot, and the next token is made of all that attention reads, in
order. So a test sees whether a wrong page gave a wrong token, and not only whether the guard said so.
"""

import pickle
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
import torch

VOCABULARY = 50_021
PADDING = -1


@dataclass
class ModelRunnerOutput:
    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: object = None
    prompt_logprobs_dict: dict[str, object] = field(default_factory=dict)
    prompt_token_id_logprobs_dict: dict[str, object] = field(default_factory=dict)
    pooler_output: object = None
    kv_connector_output: object = None
    ec_connector_output: object = None
    num_nans_in_logits: object = None
    cudagraph_stats: object = None
    aux_output_connector_output: object = None
    sampling_masks: object = None


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput([], {})


class AsyncModelRunnerOutput(ABC):
    @abstractmethod
    def get_output(self): ...

    @abstractmethod
    def get_kv_connector_output(self): ...


class AsyncOutput(AsyncModelRunnerOutput):
    def __init__(self, output):
        self.output = output

    def get_output(self):
        return self.output

    def get_kv_connector_output(self):
        return self.output.kv_connector_output


class Buffer:
    """As `CpuGpuBuffer`: the copy goes to the device when it is told to."""

    def __init__(self, *shape, dtype):
        self.cpu, self.gpu = torch.zeros(*shape, dtype=dtype), torch.zeros(*shape, dtype=dtype)
        self.np = self.cpu.numpy()

    def copy_to_gpu(self):
        self.gpu.copy_(self.cpu)


def next_token(read: list[int]) -> int:
    """Of the tokens in a window, in their order."""
    value = 7
    for token in read:
        value = (value * 31 + token + 1) % VOCABULARY
    return value


class Runner:
    """What both share. To disturb a step: ``before_forward`` with page tables as they were updated, ``laid_out`` with
    what attention is about to get, ``in_forward`` while it runs."""

    def __init__(self, vllm_config, device=None):
        self.vllm_config, self.device = vllm_config, torch.device("cpu")
        self.parallel_config = vllm_config.parallel_config
        self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.max_pages = -(-vllm_config.model_config.max_model_len // vllm_config.cache_config.block_size)
        self.tokens: dict[str, list[int]] = {}
        self.drafts: dict[str, list[int]] = {}  # of the step
        self.positions = torch.zeros(self.max_num_tokens, dtype=torch.int64)
        self.in_forward = self.before_forward = lambda runner: None
        self.laid_out = lambda tables, slots: None
        self.state = None

    def initialize_kv_cache(self, kv_cache_config, is_profiling=False, kv_cache_allocation_context=None):
        self.kv_cache_config = kv_cache_config
        self.page_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        num_groups = len(kv_cache_config.kv_cache_groups)
        self.kv_caches = torch.full((num_groups, kv_cache_config.num_blocks * self.page_size), -7)
        self._make_tables(num_groups)

    def _forward(self, requests, counts, tables, slots, lengths):
        """Each request's tokens are stored, then all read; drafts are kept as far as the model says the same."""
        starts = np.concatenate(([0], np.cumsum(counts)))
        for number, name in enumerate(requests):
            first, known = int(lengths[number]) - counts[number], self.tokens[name] + self.drafts.get(name, [])
            for offset in range(counts[number]):
                for group in range(len(tables)):
                    slot = int(slots[group][starts[number] + offset])
                    if slot != PADDING:
                        self.kv_caches[group, slot] = known[first + offset]
        self.in_forward(self)
        sampled = []
        for number, name in enumerate(requests):
            drafts, tokens = self.drafts.get(name, []), []
            is_done = int(lengths[number]) >= len(self.tokens[name]) + len(drafts)
            while is_done and len(tokens) <= len(drafts):
                tokens.append(next_token(self._read(tables, number, len(self.tokens[name]) + len(tokens))))
                if len(tokens) > len(drafts) or tokens[-1] != drafts[len(tokens) - 1]:
                    break
            sampled.append(tokens)
            self.tokens[name].extend(tokens)
        self.state = (requests, sampled)

    def _read(self, tables, row, length):
        read = []
        for group, table in enumerate(tables):
            window = getattr(self.kv_cache_config.kv_cache_groups[group].kv_cache_spec, "sliding_window", None)
            for position in range(0 if window is None else max(0, length - window), length):
                page = int(table[row, position // self.page_size])
                read.append(int(self.kv_caches[group, page * self.page_size + position % self.page_size]))
        return read

    def sample_tokens(self, grammar_output):
        if self.state is None:
            return None
        (requests, sampled), self.state = self.state, None
        return AsyncOutput(ModelRunnerOutput(requests, {name: n for n, name in enumerate(requests)}, sampled))


class Worker:
    def __init__(self, runner):
        self.model_runner = runner

    def compile_or_warm_up_model(self):
        return None


class WorkerWrapperBase:
    def init_device(self):
        return None


class MultiprocExecutor:
    """Workers in one process, and everything pickled that passes between them and the engine core."""

    def __init__(self, runners, output_rank=0):
        self.runners, self.output_rank = runners, output_rank
        self.kv_output_aggregator = None

    def run(self, method, argument, *, non_block=False):
        return self.collective_rpc(
            method,
            args=(argument,),
            non_block=non_block,
            unique_reply_rank=self.output_rank,
            kv_output_aggregator=self.kv_output_aggregator,
        )

    def collective_rpc(
        self,
        method,
        timeout=None,
        args=(),
        kwargs=None,
        non_block=False,
        unique_reply_rank=None,
        kv_output_aggregator=None,
        ec_output_aggregator=None,
    ):
        message = pickle.dumps(args)
        answers = [getattr(runner, method)(*pickle.loads(message)) for runner in self.runners]  # noqa: S301

        def result():
            waited = [one.get_output() if hasattr(one, "get_output") else one for one in answers]
            sent = [pickle.loads(pickle.dumps(one)) for one in waited]  # noqa: S301
            if kv_output_aggregator is not None:
                return kv_output_aggregator.aggregate(sent, output_rank=unique_reply_rank)
            return sent[unique_reply_rank]

        return result if non_block else result()
