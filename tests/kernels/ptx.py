"""Runs a block of inline assembly in numpy: what a GPU would compute, instruction by instruction.

The interpreter of Triton has no assembly, so kernels go round it there; this is how the blocks themselves are tested
without a GPU. Only what the blocks use is known. Source: the PTX ISA, whose rules for each instruction stand beside it.
"""

import re
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

Register = NDArray[np.uint64]  # the bits of a register, for many threads at once


def run_block(text: str, num_outputs: int, *inputs: NDArray[np.generic]) -> list[Register]:
    """The outputs ``$0`` and on, as bits; inputs are arrays of one length, which take the numbers after them."""
    registers = {f"${num_outputs + i}": _bits(array) for i, array in enumerate(inputs)}
    body = re.sub(r"//.*", "", text).strip().removeprefix("{").removesuffix("}")
    with np.errstate(all="ignore"):
        for statement in filter(None, (one.strip() for one in body.split(";"))):
            if not statement.startswith(".reg"):
                _run(statement, registers)
    return [registers[f"${i}"] for i in range(num_outputs)]


def _bits(array: NDArray[np.generic]) -> Register:
    return array.view(f"u{array.dtype.itemsize}").astype(np.uint64)


def _run(statement: str, registers: dict[str, Register]) -> None:
    name, rest = statement.split(maxsplit=1)
    parts = [one.strip() for one in re.findall(r"\{[^}]*\}|[^,{}]+", rest) if one.strip()]
    if name.startswith("mov."):
        _move(int(name[-2:]), parts, registers)
        return
    target, *operands = parts
    registers[target] = _OPERATIONS[name](*(_value(one, registers) for one in operands))


def _value(text: str, registers: dict[str, Register]) -> Register:
    return registers[text] if text in registers else np.array([int(text, 0)], np.uint64)


def _move(width: int, parts: list[str], registers: dict[str, Register]) -> None:
    """Packs, unpacks or copies; the first of several is the lowest."""
    target, source = ([one.strip() for one in part.strip("{}").split(",")] for part in parts)
    each = width // max(len(target), len(source))
    whole = sum((_value(one, registers) << np.uint64(each * i) for i, one in enumerate(source)), np.uint64(0))
    for i, one in enumerate(target):
        registers[one] = (whole >> np.uint64(each * i)) & np.uint64(2**each - 1) if len(target) > 1 else whole


def _low(bits: Register, width: int) -> Register:
    return bits & np.uint64(2**width - 1)


def _floats(bits: Register, dtype: torch.dtype) -> NDArray[np.float64]:
    """Exactly, since float64 holds every value of a shorter format."""
    width = dtype.itemsize
    raw = torch.from_numpy(_low(bits, 8 * width).astype(f"u{width}").view(f"i{width}"))
    return raw.view(dtype).double().numpy()


def _rounded(values: NDArray[np.float64], dtype: torch.dtype) -> Register:
    """Ties to even. Torch rounds to float32 before BF16, which holds what is rounded here exactly."""
    width = dtype.itemsize
    rounded = torch.from_numpy(np.atleast_1d(values)).to(dtype).view(getattr(torch, f"int{8 * width}")).numpy()
    return rounded.view(f"u{width}").astype(np.uint64)


def _pairs(operation: Callable[..., NDArray[np.float64]]) -> Callable[..., Register]:
    """An operation on two BF16 at once, each result rounded once."""

    def run(*operands: Register) -> Register:
        halves = [
            _rounded(operation(*(_floats(one >> np.uint64(shift), torch.bfloat16) for one in operands)), torch.bfloat16)
            for shift in (0, 16)
        ]
        return halves[0] | halves[1] << np.uint64(16)

    return run


def _two_floats_to_bf16(upper: Register, lower: Register) -> Register:
    """The first operand goes to the upper half."""
    low, high = (_rounded(_floats(one, torch.float32), torch.bfloat16) for one in (lower, upper))
    return low | high << np.uint64(16)


def _e4m3_to_half(codes: Register) -> Register:
    """The lower byte goes to the lower half."""
    halves = [_rounded(_floats(codes >> np.uint64(shift), torch.float8_e4m3fn), torch.float16) for shift in (0, 8)]
    return halves[0] | halves[1] << np.uint64(16)


def _product(a: Register, b: Register) -> Register:
    """One float32 multiplication, subnormal numbers kept."""
    first, second = (_low(one, 32).astype(np.uint32).view(np.float32) for one in (a, b))
    return np.atleast_1d(first * second).view(np.uint32).astype(np.uint64)


def _permute(a: Register, b: Register, selector: Register) -> Register:
    """Each nibble of the selector names a byte of the second operand over the first."""
    both = _low(a, 32) | b << np.uint64(32)
    chosen = np.uint64(0)
    for place in range(4):
        byte = (int(selector[0]) >> (4 * place)) & 7
        chosen = chosen | ((both >> np.uint64(8 * byte)) & np.uint64(0xFF)) << np.uint64(8 * place)
    return chosen


def _by_table(a: Register, b: Register, c: Register, table: Register) -> Register:
    """Bit by bit: the table's bit of number 4 a + 2 b + c."""
    found = np.uint64(0)
    for number in range(8):
        if int(table[0]) >> number & 1:
            terms = [one if number >> place & 1 else ~one for one, place in ((a, 2), (b, 1), (c, 0))]
            found = found | (terms[0] & terms[1] & terms[2])
    return _low(found, 32)


_OPERATIONS: dict[str, Callable[..., Register]] = {
    "shl.b32": lambda a, n: _low(a << n, 32),
    "shr.u32": lambda a, n: _low(a, 32) >> n,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "lop3.b32": _by_table,
    "prmt.b32": _permute,
    "abs.bf16x2": lambda a: a & np.uint64(0x7FFF7FFF),
    "max.bf16x2": _pairs(np.fmax),  # the number, where the other is NaN
    "min.bf16x2": _pairs(np.fmin),
    "fma.rn.bf16x2": _pairs(lambda a, b, c: a * b + c),
    "mul.rn.f32": _product,
    "cvt.rn.f16x2.e4m3x2": _e4m3_to_half,
    "cvt.f32.f16": lambda a: _rounded(_floats(a, torch.float16), torch.float32),
    "cvt.rn.bf16x2.f32": _two_floats_to_bf16,
}
