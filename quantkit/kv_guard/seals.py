"""Seals of single records in Python integers, to explain a violation: see `quantkit_kernels.reference.kv_tags`."""

_WORD = (1 << 64) - 1
_MARK = 0x51ED_2705
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNDO_FIRST, _UNDO_SECOND = pow(_FIRST, -1, 1 << 64), pow(_SECOND, -1, 1 << 64)
INDEX = 0xFFFF_FFFF
FREE_INDEX = 0xFFFF_FFFF


def mix(x: int) -> int:
    """Splitmix64's finalizer."""
    x &= _WORD
    x = (x ^ (x >> 30)) * _FIRST & _WORD
    x = (x ^ (x >> 27)) * _SECOND & _WORD
    return x ^ (x >> 31)


def unmix(x: int) -> int:
    """The number whose `mix` is ``x``."""
    x = _unshift(x & _WORD, 31) * _UNDO_SECOND & _WORD
    x = _unshift(x, 27) * _UNDO_FIRST & _WORD
    return _unshift(x, 30)


def seal_of(generation: int, owner: int, index: int) -> int:
    """Without a page's mark, as an unsigned number."""
    return mix((mix(mix(generation) ^ (owner & _WORD)) + index) & _WORD)


def mark_of(page: int) -> int:
    """What makes a seal that of a page."""
    return mix(page + _MARK)


def page_of_mark(mark: int) -> int:
    """The page of a mark; of other numbers one that no pool has, but for 2^-33."""
    return (unmix(mark) - _MARK) & _WORD


def _unshift(x: int, bits: int) -> int:
    """Undo ``x ^ (x >> bits)``."""
    result, shift = x, bits
    while shift < 64:
        result ^= x >> shift
        shift += bits
    return result
