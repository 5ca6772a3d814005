"""Generate SIMD code for numba kernels, with vectors of 16 lanes, by LLVM.

A result is bit-identical regardless of the other numbers in the same call. If a compiler vectorizes a loop, the
remainder at its end runs through other code, which may round differently. Here all numbers of an array go through the
same instructions, and products are summed by fused multiply-adds in the order of their index. On a processor with
shorter vectors LLVM splits the vectors of 16 lanes, with the same bits.

``builder`` is always llvmlite's; addresses are 64-bit integers. A *kind* is the number of a dtype in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, Final

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ssd.jit.addresses import prefetch_line

LANES: Final = 16
KINDS: Final = {"torch.float32": 0, "torch.bfloat16": 1, "torch.float16": 2}
"""The dtypes that SIMD kernels read and write, by torch's names, with the number that kernels take as ``kind``."""
_BFLOAT16, _FLOAT16 = 1, 2
ITEMSIZES: Final = (4, 2, 2)

INT, FLOAT, WORD = ir.IntType(32), ir.FloatType(), ir.IntType(64)
VECTOR, INTS, HALVES = (ir.VectorType(each, LANES) for each in (FLOAT, INT, ir.IntType(16)))
_FLOAT16S = ir.VectorType(ir.HalfType(), LANES)

_IS_WIDE = binding.get_host_cpu_features().get("avx512f", False)
TILE_VECTORS: Final = 4 if _IS_WIDE else 2
TILE_ROWS: Final = 4 if _IS_WIDE else 2
"""The number of rows of the matrix-product block that `tile` keeps in registers. It does not affect any result."""


_ROWS_AHEAD: Final = 24
"""The distance in rows at which `tile` prefetches b: the processor itself does not prefetch rows that are pages apart.
"""
_CACHE_LINE: Final = 64


def constant(value: float, like: Any = VECTOR) -> Any:
    return ir.Constant(like, [value] * LANES)


def _number(value: Any) -> Any:
    return ir.Constant(WORD, value) if isinstance(value, int) else value


def offset_address(builder: Any, base: Any, *steps: tuple[Any, Any]) -> Any:
    """Generate code that adds ``count * size`` to the address ``base`` for each pair (count, size) in ``steps``."""
    for count, size in steps:
        base = builder.add(base, builder.mul(_number(count), _number(size)))
    return base


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Generate a SIMD fused multiply-add: ``a * b + c``, rounded once."""
    name = "llvm.fma.v16f32"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(VECTOR, [VECTOR] * 3), name)
    return builder.call(function, [a, b, c])


def splat(builder: Any, scalar: Any) -> Any:
    """Generate a SIMD vector whose lanes all contain ``scalar``."""
    nothing = ir.Constant(VECTOR, ir.Undefined)
    return builder.shuffle_vector(
        builder.insert_element(nothing, scalar, ir.Constant(INT, 0)), nothing, constant(0, INTS)
    )


def read(builder: Any, address: Any, kind: int) -> Any:
    """Generate code that loads 16 numbers of the dtype ``kind`` (see `KINDS`) as a float32 SIMD vector."""
    stored = (VECTOR, HALVES, _FLOAT16S)[kind]
    found = builder.load(builder.inttoptr(address, stored.as_pointer()))
    found.align = ITEMSIZES[kind]
    return _widened(builder, found, kind)


def _widened(builder: Any, found: Any, kind: int) -> Any:
    if kind == _BFLOAT16:
        return builder.bitcast(builder.shl(builder.zext(found, INTS), constant(16, INTS)), VECTOR)
    return builder.fpext(found, VECTOR) if kind == _FLOAT16 else found


def write(builder: Any, x: Any, address: Any, kind: int) -> None:
    """Generate code that converts a float32 SIMD vector to the dtype ``kind`` (see `KINDS`) and stores it."""
    found = _narrowed(builder, x, kind)
    builder.store(found, builder.inttoptr(address, found.type.as_pointer())).align = ITEMSIZES[kind]


def round_to_kind(builder: Any, x: Any, kind: int) -> Any:
    """Generate code that rounds a float32 SIMD vector to the nearest numbers of the dtype ``kind`` (see `KINDS`)."""
    return _widened(builder, _narrowed(builder, x, kind), kind)


def _narrowed(builder: Any, x: Any, kind: int) -> Any:
    """Generate code that converts a float32 SIMD vector to a dtype, rounding ties to even. NaN stays NaN."""
    if kind == _FLOAT16:
        return builder.fptrunc(x, _FLOAT16S)
    if kind == 0:
        return x
    bits, sixteen = builder.bitcast(x, INTS), constant(16, INTS)
    odd = builder.and_(builder.lshr(bits, sixteen), constant(1, INTS))
    nearest = builder.add(bits, builder.add(odd, constant(0x7FFF, INTS)))
    kept = builder.select(builder.fcmp_unordered("uno", x, x), constant(0x7FC00000, INTS), nearest)
    return builder.trunc(builder.lshr(kept, sixteen), HALVES)


def reduce_lanes(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Generate code that combines the 16 lanes of a SIMD vector into one number, for example into their sum.

    The order is fixed: ``combine`` joins lane i with lane i + 8, then with i + 4, i + 2 and i + 1.
    """
    size = LANES
    while size > 1:
        size //= 2
        swapped = ir.Constant(INTS, [lane ^ size for lane in range(LANES)])
        vector = combine(vector, builder.shuffle_vector(vector, ir.Constant(VECTOR, ir.Undefined), swapped))
    return builder.extract_element(vector, ir.Constant(INT, 0))


def loop(builder: Any, count: Any, values: Sequence[Any], body: Callable[[Any, Sequence[Any]], Sequence[Any]]) -> Any:
    """Generate a loop of ``count`` iterations, and return the loop-carried values after it.

    ``values`` are the values before the loop. ``body`` maps the index and the values to the next values.
    """
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(WORD)
    index.add_incoming(_number(0), before)
    carried = [builder.phi(value.type) for value in values]
    for phi, value in zip(carried, values, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    found = body(index, carried)
    index.add_incoming(builder.add(index, _number(1)), builder.block)
    for phi, value in zip(carried, found, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return carried


def map_vectors(
    builder: Any,
    count: Any,
    sources: Sequence[tuple[Any, int]],
    targets: Sequence[tuple[Any, int]],
    function: Callable[..., Sequence[Any]],
    values: Sequence[Any] = (),
) -> Any:
    """Generate code that applies ``function`` to arrays of ``count`` numbers, a SIMD vector at a time.

    The last numbers are padded with zeros to a whole vector.

    Args:
        builder: llvmlite's builder.
        count: The number of elements of each array.
        sources: The address and the kind (see `KINDS`) of each input array.
        targets: The address and the kind of each output array.
        function: Maps a vector of each input array, and the loop-carried ``values``, to a vector for each output array
            and the next values.
        values: The initial loop-carried values.

    Returns:
        The loop-carried values after the loop.
    """
    whole, left = builder.sdiv(count, _number(LANES)), builder.srem(count, _number(LANES))
    rooms = [builder.ptrtoint(cgutils.alloca_once(builder, VECTOR), WORD) for _ in (*sources, *targets)]

    def body(index: Any, carried: Sequence[Any]) -> Sequence[Any]:
        given = [
            read(builder, offset_address(builder, a, (index, LANES * ITEMSIZES[kind])), kind) for a, kind in sources
        ]
        found = function(*given, *carried)
        for x, (a, kind) in zip(found, targets, strict=False):
            write(builder, x, offset_address(builder, a, (index, LANES * ITEMSIZES[kind])), kind)
        return found[len(targets) :]

    def rest(_index: Any, carried: Sequence[Any]) -> Sequence[Any]:
        given = []
        for (a, kind), room in zip(sources, rooms, strict=False):
            write(builder, constant(0.0), room, kind)
            _copy(builder, offset_address(builder, a, (whole, LANES * ITEMSIZES[kind])), room, left, ITEMSIZES[kind])
            given.append(read(builder, room, kind))
        found = function(*given, *carried)
        for x, (a, kind), room in zip(found, targets, rooms[len(sources) :], strict=False):
            write(builder, x, room, kind)
            _copy(builder, room, offset_address(builder, a, (whole, LANES * ITEMSIZES[kind])), left, ITEMSIZES[kind])
        return found[len(targets) :]

    carried = loop(builder, whole, list(values), body)
    return loop(builder, builder.zext(builder.icmp_signed(">", left, _number(0)), WORD), carried, rest)


def _copy(builder: Any, source: Any, target: Any, count: Any, itemsize: int) -> None:
    word = ir.IntType(8 * itemsize).as_pointer()

    def body(index: Any, _carried: Sequence[Any]) -> Sequence[Any]:
        found = builder.load(builder.inttoptr(offset_address(builder, source, (index, itemsize)), word))
        builder.store(found, builder.inttoptr(offset_address(builder, target, (index, itemsize)), word))
        return []

    loop(builder, count, [], body)


def for_kinds(*arguments: Any, result: Any = types.none) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that turns a generator of SIMD code into a numba function with variants for all dtypes.

    The decorated ``generate(builder, kind, *arguments)`` is called once for each dtype in `KINDS`, to generate its
    variant. The numba function takes the kind as its first argument and runs the variant for it. ``arguments`` and
    ``result`` are numba types.
    """

    def make(generate: Callable[..., Any]) -> Any:
        def typed(_typing: Any, *_given: Any) -> Any:
            def build(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
                found = []
                after = builder.append_basic_block("after")
                blocks = [builder.append_basic_block("kind") for _ in KINDS]
                chosen = builder.switch(args[0], blocks[0])
                for kind, block in enumerate(blocks):
                    chosen.add_case(_number(kind), block)
                    builder.position_at_end(block)
                    found.append((generate(builder, kind, *args[1:]), builder.block))
                    builder.branch(after)
                builder.position_at_end(after)
                if result is types.none:
                    return context.get_dummy_value()
                value = builder.phi(found[0][0].type)
                for each, block in found:
                    value.add_incoming(each, block)
                return value

            return result(types.int64, *arguments), build

        names = ["typing", *(f"a{i}" for i in range(1 + len(arguments)))]
        typed.__signature__ = Signature(  # type: ignore[attr-defined]
            [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        )
        typed.__name__ = generate.__name__
        return intrinsic(typed)

    return make


def tile(rows: int, vectors: int) -> Any:
    """Return a numba function that adds a matrix product to a small block of a matrix, ``c += a @ b``.

    The block c, float32[rows, 16 * vectors], stays in registers. Each element is summed in the order of the inner
    index, so blocks of all sizes give identical bits. The function takes (kind, a, a_row, b, b_row, c, c_row, n).
    ``a``, ``b`` and ``c`` are the addresses of a, float32[rows, n]; of b, [n, 16 * vectors] of the dtype ``kind``; and
    of c. ``a_row``, ``b_row`` and ``c_row`` are the numbers of bytes from one row to the next.
    """

    @for_kinds(*[types.int64] * 7)
    def add_product(
        builder: Any, kind: int, a: Any, a_row: Any, b: Any, b_row: Any, c: Any, c_row: Any, n: Any
    ) -> None:
        places = [
            offset_address(builder, c, (row, c_row), (v, 4 * LANES)) for row in range(rows) for v in range(vectors)
        ]

        def body(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
            line = offset_address(builder, b, (index, b_row))
            ahead = offset_address(builder, line, (_ROWS_AHEAD, b_row))
            for start in range(0, vectors * LANES * ITEMSIZES[kind], _CACHE_LINE):
                prefetch_line(builder, offset_address(builder, ahead, (1, start)))
            factors = [
                read(builder, offset_address(builder, line, (v, LANES * ITEMSIZES[kind])), kind) for v in range(vectors)
            ]
            found = []
            for row in range(rows):
                place = builder.inttoptr(offset_address(builder, a, (row, a_row), (index, 4)), FLOAT.as_pointer())
                number = splat(builder, builder.load(place))
                found += [fma(builder, number, factors[v], sums[row * vectors + v]) for v in range(vectors)]
            return found

        sums = loop(builder, n, [read(builder, place, 0) for place in places], body)
        for place, total in zip(places, sums, strict=True):
            write(builder, total, place, 0)

    return add_product
