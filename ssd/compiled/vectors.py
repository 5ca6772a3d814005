"""Building blocks of kernels whose results must not depend on what else is computed: vectors of 16 lanes, in LLVM's words.

A loop that a compiler vectorises sends what is left over at its end through other code, which may round otherwise. Here
every number goes through the same instructions wherever it stands: products are added by fused multiply-adds in the
order of an index, and functions are polynomials over whole vectors. So a number's bits follow from its own inputs.
On a processor with shorter vectors LLVM cuts these into several, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

LANES: Final = 16
KINDS: Final = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Types of numbers that kernels read and write; they compute in float32."""
ITEMSIZES: Final = (4, 2, 2)

_INT, _FLOAT, _WORD = ir.IntType(32), ir.FloatType(), ir.IntType(64)
_VECTOR, _INTS, _HALVES = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES), ir.VectorType(ir.IntType(16), LANES)

_HAS_WIDE_VECTORS: Final = binding.get_host_cpu_features().get("avx512f", False)
TILE_VECTORS: Final = 4 if _HAS_WIDE_VECTORS else 2
TILE_ROWS: Final = 4 if _HAS_WIDE_VECTORS else 2
"""What `tile` keeps in registers; no bit of a result depends on it."""


def _constant(value: float, like: Any = _VECTOR) -> Any:
    if like is _FLOAT or like is _INT:
        return ir.Constant(like, value)
    return ir.Constant(like, [value] * LANES)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    name = "llvm.fma.v16f32" if a.type == _VECTOR else "llvm.fma.f32"
    function = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(a.type, [a.type] * 3), name
    )
    return builder.call(function, [a, b, c])


def _pointer(builder: Any, address: Any, element: Any) -> Any:
    return builder.inttoptr(address, element.as_pointer())


def _read(builder: Any, address: Any, kind: int) -> Any:
    """16 numbers of a kind as float32."""
    stored = (_VECTOR, _HALVES, ir.VectorType(ir.HalfType(), LANES))[kind]
    found = builder.load(_pointer(builder, address, stored))
    found.align = ITEMSIZES[kind]
    if kind == KINDS["bfloat16"]:
        wide = builder.shl(builder.zext(found, _INTS), _constant(16, _INTS))
        return builder.bitcast(wide, _VECTOR)
    return builder.fpext(found, _VECTOR) if kind == KINDS["float16"] else found


def _rounded(builder: Any, x: Any, kind: int) -> Any:
    """float32 as a kind stores them, to the nearest, ties to even; what is no number stays none."""
    if kind == KINDS["float16"]:
        return builder.fptrunc(x, ir.VectorType(ir.HalfType(), LANES))
    if kind == KINDS["float32"]:
        return x
    bits, sixteen = builder.bitcast(x, _INTS), _constant(16, _INTS)
    odd = builder.and_(builder.lshr(bits, sixteen), _constant(1, _INTS))
    rounded = builder.add(bits, builder.add(odd, _constant(0x7FFF, _INTS)))
    kept = builder.select(builder.fcmp_unordered("uno", x, x), _constant(0x7FC00000, _INTS), rounded)
    return builder.trunc(builder.lshr(kept, sixteen), _HALVES)


def _write(builder: Any, x: Any, address: Any, kind: int) -> None:
    rounded = _rounded(builder, x, kind)
    stored = builder.store(rounded, _pointer(builder, address, rounded.type))
    stored.align = ITEMSIZES[kind]


def _exp(builder: Any, x: Any) -> Any:
    """e ** x to 2 units in the last place, 0 below -87; x <= 88 (Cody and Waite 1980; Cephes' polynomial)."""
    lowest, magic = _constant(-87.0), _constant(12582912.0)  # 1.5 * 2 ** 23: adding it rounds to a whole number
    below = builder.fcmp_ordered("olt", x, lowest)
    bounded = builder.select(below, lowest, x)
    shifted = _fma(builder, bounded, _constant(1.44269504088896341), magic)
    whole = builder.fsub(shifted, magic)
    rest = _fma(builder, whole, _constant(-0.693359375), bounded)
    rest = _fma(builder, whole, _constant(2.12194440e-4), rest)
    found = _constant(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
        found = _fma(builder, found, rest, _constant(factor))
    power = builder.add(
        builder.shl(builder.bitcast(shifted, _INTS), _constant(23, _INTS)), _constant(0x3F800000, _INTS)
    )
    return builder.select(below, _constant(0.0), builder.fmul(found, builder.bitcast(power, _VECTOR)))


def _bounded(builder: Any, x: Any, limit: float) -> Any:
    high, low = _constant(limit), _constant(-limit)
    x = builder.select(builder.fcmp_ordered("ogt", x, high), high, x)
    return builder.select(builder.fcmp_ordered("olt", x, low), low, x)


def _tanh(builder: Any, x: Any) -> Any:
    """1 - 2 / (e ** 2x + 1), which loses digits near 0, where x - x ** 3 / 3 + ... takes its place."""
    power = _exp(builder, builder.fmul(_bounded(builder, x, 20.0), _constant(2.0)))
    far = builder.fsub(_constant(1.0), builder.fdiv(_constant(2.0), builder.fadd(power, _constant(1.0))))
    square = builder.fmul(x, x)
    near = _constant(-5.70498872745e-3)
    for factor in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        near = _fma(builder, near, square, _constant(factor))
    near = _fma(builder, builder.fmul(near, square), x, x)
    is_near = builder.fcmp_ordered("olt", square, _constant(0.390625))
    return builder.select(is_near, near, far)


def _silu(builder: Any, x: Any) -> Any:
    power = _exp(builder, _bounded(builder, builder.fneg(x), 88.0))
    return builder.fdiv(x, builder.fadd(_constant(1.0), power))


def _gelu_tanh(builder: Any, x: Any) -> Any:
    inner = builder.fmul(builder.fmul(x, x), x)
    inner = builder.fmul(_constant(0.7978845608028654), _fma(builder, inner, _constant(0.044715), x))
    return builder.fmul(builder.fmul(_constant(0.5), x), builder.fadd(_constant(1.0), _tanh(builder, inner)))


def _loop(builder: Any, count: Any, values: Sequence[Any], body: Callable[[Any, Sequence[Any]], Sequence[Any]]) -> Any:
    """``values`` after ``body(index, values)`` for each index below ``count``."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_WORD)
    index.add_incoming(ir.Constant(_WORD, 0), before)
    carried = [builder.phi(value.type) for value in values]
    for phi, value in zip(carried, values, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    found = body(index, carried)
    index.add_incoming(builder.add(index, ir.Constant(_WORD, 1)), builder.block)
    for phi, value in zip(carried, found, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return carried


def _splat(builder: Any, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), _constant(0, _INTS))


def _at(builder: Any, base: Any, *steps: tuple[Any, Any]) -> Any:
    """An address: ``base`` and of each step a count times a size."""
    for count, size in steps:
        count, size = (ir.Constant(_WORD, each) if isinstance(each, int) else each for each in (count, size))
        base = builder.add(base, builder.mul(count, size))
    return base


def tile(rows: int, vectors: int, kind: int) -> Any:
    """For kernels: ``c += a @ b`` of a tile that stays in registers, each sum in the order of the inner index.

    The intrinsic takes (a, a_row, b, b_row, c, c_row, n): addresses of a, float32[rows, n], of b, ``kind``
    [n, 16 * vectors], and of c, float32[rows, 16 * vectors], each with the bytes between its rows; and n.
    """

    @intrinsic
    def add_product(
        _typing: Any, a: Any, a_row: Any, b: Any, b_row: Any, c: Any, c_row: Any, n: Any
    ) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            a, a_row, b, b_row, c, c_row, n = args
            places = [
                _at(builder, c, (row, c_row), (4 * LANES * vector, 1)) for row in range(rows) for vector in range(vectors)
            ]
            sums = [_read(builder, place, KINDS["float32"]) for place in places]

            def body(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
                line = _at(builder, b, (index, b_row))
                read = [
                    _read(builder, _at(builder, line, (LANES * ITEMSIZES[kind] * v, 1)), kind) for v in range(vectors)
                ]
                found = []
                for row in range(rows):
                    number = builder.load(_pointer(builder, _at(builder, a, (row, a_row), (index, 4)), _FLOAT))
                    factor = _splat(builder, number)
                    found += [_fma(builder, factor, read[v], sums[row * vectors + v]) for v in range(vectors)]
                return found

            for place, total in zip(places, _loop(builder, n, sums, body), strict=True):
                _write(builder, total, place, KINDS["float32"])
            return context.get_dummy_value()

        return types.none(*[types.int64] * 7), generate

    return add_product


def _folded(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All lanes combined, in halves."""
    size = LANES
    while size > 1:
        size //= 2
        swapped = ir.Constant(_INTS, [(lane ^ size) for lane in range(LANES)])
        vector = combine(vector, builder.shuffle_vector(vector, ir.Constant(_VECTOR, ir.Undefined), swapped))
    return builder.extract_element(vector, ir.Constant(_INT, 0))


@intrinsic
def highest_of(_typing: Any, _address: Any, _vectors: Any, _least: Any) -> Any:
    """The highest of ``least`` and so many vectors of float32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        address, vectors, least = args

        def higher(x: Any, y: Any) -> Any:
            return builder.select(builder.fcmp_unordered("ult", x, y), y, x)  # what is no number is passed on

        def body(index: Any, highest: Sequence[Any]) -> Sequence[Any]:
            return [higher(highest[0], _read(builder, _at(builder, address, (index, 4 * LANES)), 0))]

        (found,) = _loop(builder, vectors, [_splat(builder, least)], body)
        return _folded(builder, found, higher)

    return types.float32(types.int64, types.int64, types.float32), generate


@intrinsic
def exp_and_sum(_typing: Any, _address: Any, _vectors: Any, _highest: Any) -> Any:
    """``e ** (x - highest)`` in the place of every x of so many vectors of float32; returns their sum, lane by lane."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        address, vectors, highest = args
        subtracted = _splat(builder, highest)

        def body(index: Any, total: Sequence[Any]) -> Sequence[Any]:
            place = _at(builder, address, (index, 4 * LANES))
            found = _exp(builder, builder.fsub(_read(builder, place, 0), subtracted))
            _write(builder, found, place, 0)
            return [builder.fadd(total[0], found)]

        (total,) = _loop(builder, vectors, [_constant(0.0)], body)
        return _folded(builder, total, builder.fadd)

    return types.float32(types.int64, types.int64, types.float32), generate


@intrinsic
def cap(_typing: Any, _address: Any, _vectors: Any, _limit: Any) -> Any:
    """``limit * tanh(x / limit)`` in the place of every x of so many vectors of float32."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        address, vectors, limit = args
        limits = _splat(builder, limit)

        def body(index: Any, _values: Sequence[Any]) -> Sequence[Any]:
            place = _at(builder, address, (index, 4 * LANES))
            x = builder.fdiv(_read(builder, place, 0), limits)
            _write(builder, builder.fmul(_tanh(builder, x), limits), place, 0)
            return []

        _loop(builder, vectors, [], body)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.float32), generate


def _numbers(
    builder: Any, count: Any, reads: Sequence[tuple[Any, int]], out: tuple[Any, int], function: Callable[..., Any]
) -> None:
    """``out[i] = function(reads[0][i], ...)`` for ``count`` numbers: whole vectors, then those left over in one more."""
    whole, left = builder.sdiv(count, ir.Constant(_WORD, LANES)), builder.srem(count, ir.Constant(_WORD, LANES))

    def body(index: Any, _values: Sequence[Any]) -> Sequence[Any]:
        given = [_read(builder, _at(builder, a, (index, LANES * ITEMSIZES[kind])), kind) for a, kind in reads]
        _write(builder, function(*given), _at(builder, out[0], (index, LANES * ITEMSIZES[out[1]])), out[1])
        return []

    _loop(builder, whole, [], body)
    with builder.if_then(builder.icmp_signed(">", left, ir.Constant(_WORD, 0))):
        rooms = [builder.alloca(ir.ArrayType(ir.IntType(8), 4 * LANES)) for _ in (*reads, out)]
        rooms = [builder.ptrtoint(room, _WORD) for room in rooms]
        for (a, kind), room in zip(reads, rooms, strict=False):
            _write(builder, _constant(0.0), room, kind)
            _copy(builder, _at(builder, a, (whole, LANES * ITEMSIZES[kind])), room, left, ITEMSIZES[kind])
        given = [_read(builder, room, kind) for (_, kind), room in zip(reads, rooms, strict=False)]
        _write(builder, function(*given), rooms[-1], out[1])
        _copy(builder, rooms[-1], _at(builder, out[0], (whole, LANES * ITEMSIZES[out[1]])), left, ITEMSIZES[out[1]])


def _copy(builder: Any, source: Any, target: Any, count: Any, itemsize: int) -> None:
    word = ir.IntType(8 * itemsize)

    def body(index: Any, _values: Sequence[Any]) -> Sequence[Any]:
        found = builder.load(_pointer(builder, _at(builder, source, (index, itemsize)), word))
        builder.store(found, _pointer(builder, _at(builder, target, (index, itemsize)), word))
        return []

    _loop(builder, count, [], body)


def scaled(source: int, target: int) -> Any:
    """For kernels: ``target[i] = source[i] * factor``, of two kinds: (source, target, count, factor), two addresses."""

    @intrinsic
    def scale(_typing: Any, _source: Any, _target: Any, _count: Any, _factor: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            factor = _splat(builder, args[3])
            _numbers(builder, args[2], [(args[0], source)], (args[1], target), lambda x: builder.fmul(x, factor))
            return context.get_dummy_value()

        return types.none(types.int64, types.int64, types.int64, types.float32), generate

    return scale
