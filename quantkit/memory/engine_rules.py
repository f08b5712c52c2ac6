"""What a memory plan must know of an engine. ``sglang.py`` and ``vllm.py`` say it for one version each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from quantkit.families.kv_shape import KvShape
from quantkit.memory.budget import Band, Budget
from quantkit.memory.kv_format import KvDtype, KvLayout
from quantkit.memory.serving import MemoryRequest, Serving


@dataclass(frozen=True, kw_only=True)
class EngineRules:
    """Facts, and the few functions that facts alone cannot say.

    ``kv_dtype_words``: its words for them.
    ``heads_everywhere``: families whose head every pipeline stage builds. ``deals_out_index``: DCP divides index keys
    and the draft's rows too. ``views_bf16_weights``: no copy of a ``kv_b_proj`` that is BF16 already.
    ``keeps_query_slice``: beside the queries gathered for DCP. ``repacked_share``: of a layer's INT4 experts, twice in
    memory while they are repacked. ``sizes_pool_with_draft_ends``: the draft layer has an embedding and a head of its
    own while the pool is made. ``logs_local_rows``: with DCP a logged token is a row of one rank.
    ``refuses_below_one_request``: does not start unless the pool holds one request of the context's length.
    ``takes_max_running_requests``: the plan depends on how many requests run at once.
    ``buffers``: what was logged beside weights and copies, where the overhead does not count it.
    """

    title: str
    fraction_option: str
    context_option: str
    eager_option: str
    kv_dtype_words: Mapping[KvDtype, str]
    has_pool_roles: bool
    heads_everywhere: frozenset[str]
    deals_out_index: bool
    views_bf16_weights: bool
    keeps_query_slice: bool
    repacked_share: Fraction
    sizes_pool_with_draft_ends: bool
    logs_local_rows: bool
    refuses_below_one_request: bool
    takes_max_running_requests: bool
    buffers: Band
    check_request: Callable[[KvShape, MemoryRequest], None]  # raises UsageError for what the engine refuses
    kv_dtype: Callable[[KvShape, MemoryRequest, str], KvDtype]  # where the user leaves it open; the family's name
    sparse_layout: Callable[[MemoryRequest, KvDtype], KvLayout]  # of sparse attention's rows
    page_tokens: Callable[[Serving], int]  # the pool holds whole pages
    budget: Callable[[Serving, Band, float], Budget]  # of what is loaded, and the bytes of a token
    doubts: Callable[[Serving], list[str]]  # why it may not run at all, which no figure says
    remarks: Callable[[Serving, int], list[str]]  # what the server must be told, what is not known; tokens in the pool
