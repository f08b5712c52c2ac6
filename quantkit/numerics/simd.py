"""Vectors of 16 lanes for numba: LLVM vector values with arithmetic, so that sums stay in registers.

LLVM maps them to AVX-512 as they are and splits them for AVX2 and NEON; the bytes do not depend on that,
as every operation is one IEEE operation per lane. Arrays are addressed flat and never checked.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending
from numba.core import cgutils, types
from numba.extending import models, overload, register_model

LANES = 16

Builder = Any  # llvmlite is untyped
intrinsic: Any = extending.intrinsic  # its own annotation counts the typing context as an argument


class Vector(types.Type):
    """``kind`` is f32, f64, i32, i64 or mask."""

    def __init__(self, kind: str, element: ir.Type) -> None:
        self.kind = kind
        self.llvm = ir.VectorType(element, LANES)
        super().__init__(name=f"Vector({kind})")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)  # type: ignore[no-untyped-call]


F32 = Vector("f32", ir.FloatType())
F64 = Vector("f64", ir.DoubleType())
I32 = Vector("i32", ir.IntType(32))
I64 = Vector("i64", ir.IntType(64))
MASK = Vector("mask", ir.IntType(1))

_FLOATS = (F32, F64)
_INTS = (I32, I64)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)


def _data(context: Any, builder: Builder, array_type: Any, array: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(data, ir.IntType(8).as_pointer())


def _at(builder: Builder, data: Any, offset: Any, llvm: Any) -> Any:
    """The address of the byte at ``offset``, as a pointer to ``llvm``."""
    return builder.bitcast(builder.gep(data, [offset]), llvm.as_pointer())


def _splat(builder: Builder, llvm: Any, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(llvm, ir.Undefined), scalar, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(llvm, ir.Undefined), zeros)


def _call(builder: Builder, name: str, llvm: Any, *arguments: Any) -> Any:
    suffix = {"float": "f32", "double": "f64"}[str(llvm.element)]
    function_type = ir.FunctionType(llvm, [llvm] * len(arguments))
    get_function: Any = cgutils.get_or_insert_function
    function = get_function(builder.module, function_type, f"{name}.v{LANES}{suffix}")
    return builder.call(function, arguments)


def _define_splat(vector: Vector, scalar: types.Type) -> Any:
    @intrinsic
    def splat(typingctx: Any, value: Any) -> Any:
        def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Any:
            cast = context.cast(builder, arguments[0], signature.args[0], scalar)
            return _splat(builder, vector.llvm, cast)

        return vector(value), generate

    return splat


splat_f32 = _define_splat(F32, types.float32)
splat_f64 = _define_splat(F64, types.float64)
splat_i32 = _define_splat(I32, types.int32)
splat_i64 = _define_splat(I64, types.int64)


def _define_load(vector: Vector, stored: Any = None) -> Any:
    """A load of 16 adjacent items; the index counts items. Integers narrower than a lane get zeros."""
    stored = stored or vector.llvm
    item_bytes = {"i8": 1, "i16": 2, "i32": 4, "float": 4, "double": 8}[str(stored.element)]

    @intrinsic
    def load(typingctx: Any, array: Any, index: Any) -> Any:
        def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Any:
            offset = builder.mul(arguments[1], arguments[1].type(item_bytes))
            data = _data(context, builder, signature.args[0], arguments[0])
            pointer = _at(builder, data, offset, stored)
            value = builder.load(pointer, align=1)
            return value if stored is vector.llvm else builder.zext(value, vector.llvm)

        return vector(array, types.int64), generate

    return load


load_f32 = _define_load(F32)
load_f64 = _define_load(F64)
load_u8 = _define_load(I32, _BYTES)
load_u16 = _define_load(I32, _SHORTS)


def _define_store(vector: Vector, stored: Any = None) -> Any:
    """A store of 16 adjacent items; the index counts items. A narrower item takes the lower bits."""
    stored = stored or vector.llvm
    item_bytes = {"i8": 1, "i16": 2, "float": 4, "double": 8}[str(stored.element)]

    @intrinsic
    def store(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Any:
            offset = builder.mul(arguments[1], arguments[1].type(item_bytes))
            data = _data(context, builder, signature.args[0], arguments[0])
            pointer = _at(builder, data, offset, stored)
            value = arguments[2] if stored is vector.llvm else builder.trunc(arguments[2], stored)
            builder.store(value, pointer, align=1)
            return context.get_dummy_value()

        return types.none(array, types.int64, vector), generate

    return store


store_f32 = _define_store(F32)
store_f64 = _define_store(F64)
store_u8 = _define_store(I32, _BYTES)
store_u16 = _define_store(I32, _SHORTS)


@intrinsic
def gather_words(typingctx: Any, array: Any, offset: Any, stride: Any) -> Any:
    """Lane i is the 32-bit word at byte ``offset + i * stride``, wherever that lies."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Any:
        vector = ir.Constant(I32.llvm, ir.Undefined)
        data = _data(context, builder, signature.args[0], arguments[0])
        where = arguments[1]
        for lane in range(LANES):
            pointer = _at(builder, data, where, ir.IntType(32))
            vector = builder.insert_element(vector, builder.load(pointer, align=1), ir.IntType(32)(lane))
            where = builder.add(where, arguments[2])
        return vector

    return I32(array, types.int64, types.int64), generate


@intrinsic
def scatter_words(typingctx: Any, array: Any, offset: Any, stride: Any, value: Any) -> Any:
    """The store that mirrors ``gather_words``."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Any:
        data = _data(context, builder, signature.args[0], arguments[0])
        where = arguments[1]
        for lane in range(LANES):
            pointer = _at(builder, data, where, ir.IntType(32))
            builder.store(builder.extract_element(arguments[3], ir.IntType(32)(lane)), pointer, align=1)
            where = builder.add(where, arguments[2])
        return context.get_dummy_value()

    return types.none(array, types.int64, types.int64, I32), generate


def _define_conversion(opcode: str, source: Vector, target: Vector) -> Any:
    @intrinsic
    def convert(typingctx: Any, value: Any) -> Any:
        def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Any:
            return getattr(builder, opcode)(arguments[0], target.llvm)

        return target(source), generate

    return convert


f32_to_f64 = _define_conversion("fpext", F32, F64)
f64_to_f32 = _define_conversion("fptrunc", F64, F32)
f32_to_i32 = _define_conversion("fptosi", F32, I32)
i32_to_f64 = _define_conversion("sitofp", I32, F64)
i64_to_i32 = _define_conversion("trunc", I64, I32)
i32_bits_as_f32 = _define_conversion("bitcast", I32, F32)
f32_bits_as_i32 = _define_conversion("bitcast", F32, I32)
f64_bits_as_i64 = _define_conversion("bitcast", F64, I64)


def _define_math(name: str, num_arguments: int) -> Any:
    """An LLVM intrinsic on vectors of one float kind."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Any:
        return _call(builder, name, signature.return_type.llvm, *arguments)

    if num_arguments == 1:

        @intrinsic
        def unary(typingctx: Any, a: Any) -> Any:
            return a(a), generate

        return unary

    @intrinsic
    def ternary(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
        return a(a, b, c), generate

    return ternary


rint = _define_math("llvm.rint", 1)
floor = _define_math("llvm.floor", 1)
sqrt = _define_math("llvm.sqrt", 1)
absolute = _define_math("llvm.fabs", 1)
# one or two roundings, as the machine likes: only for products and sums that are exact
exact_multiply_add = _define_math("llvm.fmuladd", 3)


def _define_extremum(comparison: str) -> Any:
    @intrinsic
    def extremum(typingctx: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Any:
            is_first = builder.fcmp_ordered(comparison, *arguments)
            return builder.select(is_first, *arguments)

        return a(a, b), generate

    return extremum


minimum = _define_extremum("<")
maximum = _define_extremum(">")


@intrinsic
def select(typingctx: Any, mask: Any, a: Any, b: Any) -> Any:
    """``a`` where the mask is set, else ``b``."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Any:
        return builder.select(*arguments)

    return a(mask, a, b), generate


def _define_operator(function: Callable[..., Any], kinds: tuple[Vector, ...], opcode: str) -> None:
    """Overload a binary operator for two vectors of one kind."""

    @intrinsic
    def operate(typingctx: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Any:
            return getattr(builder, opcode)(*arguments)

        return a(a, b), generate

    @overload(function, strict=False)  # the lambdas cannot repeat the annotations
    def operator_of_vectors(a: Any, b: Any) -> Any:
        if a in kinds and a == b:
            return lambda a, b: operate(a, b)  # noqa: PLW0108 (numba compiles it)
        return None


def _define_comparison(function: Callable[..., Any], comparison: str) -> None:
    @intrinsic
    def compare(typingctx: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Any:
            if signature.args[0] in _FLOATS:
                return builder.fcmp_ordered(comparison, *arguments)
            return builder.icmp_signed(comparison, *arguments)

        return MASK(a, b), generate

    @overload(function, strict=False)  # the lambdas cannot repeat the annotations
    def comparison_of_vectors(a: Any, b: Any) -> Any:
        if a in (*_FLOATS, *_INTS) and a == b:
            return lambda a, b: compare(a, b)  # noqa: PLW0108 (numba compiles it)
        return None


for _function, _float_opcode, _int_opcode in (
    (operator.add, "fadd", "add"),
    (operator.sub, "fsub", "sub"),
    (operator.mul, "fmul", "mul"),
):
    _define_operator(_function, _FLOATS, _float_opcode)
    _define_operator(_function, _INTS, _int_opcode)
_define_operator(operator.truediv, _FLOATS, "fdiv")
_define_operator(operator.and_, (*_INTS, MASK), "and_")
_define_operator(operator.or_, (*_INTS, MASK), "or_")
_define_operator(operator.lshift, _INTS, "shl")
_define_operator(operator.rshift, _INTS, "lshr")
_define_comparison(operator.lt, "<")
_define_comparison(operator.gt, ">")
_define_comparison(operator.eq, "==")
