"""What a simulated engine is like, and which of them a run has."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """``window``: tokens that a query sees, None for all; ``null_pages``: entries that it has left behind name page 0;
    ``drafts``: speculated tokens a step; ``chunk``: prompt tokens a step."""

    page_size: int
    num_pages: int
    num_rows: int
    most_pages: int  # of one row
    by_token: bool = False
    window: int | None = None
    null_pages: bool = False
    is_overlapped: bool = True
    drafts: int = 0
    chunk: int = 32
    host_pages: int = 0
    decodes: bool = True

    @property
    def most_tokens(self) -> int:
        """Of one request, with room for the tokens of two steps more than it needs."""
        return self.most_pages * self.page_size - 2 * (1 + self.drafts) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldShape:
    """An engine that serves, and one that prefills for it; ``content``: pages are summed wherever they are copied."""

    decode: EngineShape
    prefill: EngineShape | None = None
    content: bool = True


def _small(*, content: bool = True, **differences: object) -> WorldShape:
    parts: dict[str, object] = {"page_size": 4, "num_pages": 150, "num_rows": 12, "most_pages": 24, "drafts": 2}
    prefill = EngineShape(page_size=4, num_pages=120, num_rows=8, most_pages=24, decodes=False)
    decode = EngineShape(**(parts | differences))  # type: ignore[arg-type]
    return WorldShape(decode=decode, prefill=prefill, content=content)


SMALL: dict[str, WorldShape] = {
    "pages": _small(host_pages=70),
    "tokens": _small(by_token=True, host_pages=70),
    "window": _small(window=20),
    "null pages": _small(window=20, null_pages=True),
    "waiting": _small(content=False, is_overlapped=False, drafts=0, host_pages=70),
}
LARGE: dict[str, WorldShape] = {
    "pages of 16": WorldShape(
        decode=EngineShape(
            page_size=16, num_pages=2600, num_rows=64, most_pages=64, drafts=3, chunk=512, host_pages=600
        ),
        prefill=EngineShape(page_size=16, num_pages=700, num_rows=16, most_pages=64, chunk=512, decodes=False),
    ),
    "tokens": WorldShape(
        decode=EngineShape(page_size=8, num_pages=3000, num_rows=64, most_pages=64, by_token=True, chunk=256),
        prefill=EngineShape(page_size=8, num_pages=700, num_rows=16, most_pages=64, chunk=256, decodes=False),
    ),
    "window": WorldShape(
        decode=EngineShape(page_size=4, num_pages=2200, num_rows=64, most_pages=96, window=120, chunk=128, drafts=2),
        prefill=EngineShape(page_size=4, num_pages=900, num_rows=16, most_pages=96, chunk=128, decodes=False),
    ),
    "page size 1": WorldShape(
        decode=EngineShape(page_size=1, num_pages=4000, num_rows=48, most_pages=128, by_token=True, chunk=64),
    ),
}
