"""Elementwise functions (exp, tanh, activations) of SIMD vectors, and numba functions that apply them to arrays.

They use polynomials. Their bits are the same in every lane (see `simd`); they err by a few units in the last place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ssd.model.cpu.simd import (
    INTS,
    ITEMSIZES,
    LANES,
    VECTOR,
    WORD,
    constant,
    fma,
    for_kinds,
    loop,
    map_vectors,
    offset_address,
    read,
    reduce_lanes,
    round_to_kind,
    splat,
    write,
)


def _series(builder: Any, x: Any, factors: Sequence[float]) -> Any:
    found = constant(factors[0])
    for factor in factors[1:]:
        found = fma(builder, found, x, constant(factor))
    return found


def _within(builder: Any, x: Any, limit: float) -> Any:
    high, low = constant(limit), constant(-limit)
    x = builder.select(builder.fcmp_ordered("ogt", x, high), high, x)
    return builder.select(builder.fcmp_ordered("olt", x, low), low, x)


_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0)
"""The polynomial coefficients of e ** x, from expf in the Cephes library."""


def _exp(builder: Any, x: Any) -> Any:
    """Generate code for e ** x of a SIMD vector with x <= 88; the result is 0 for x < -87.

    The code splits ``x = n * ln(2) + rest``, with ln(2) as the sum of two numbers for accuracy (Cody and Waite 1980).
    """
    lowest, magic = constant(-87.0), constant(12582912.0)  # 1.5 * 2 ** 23; adding it rounds to an integer
    below = builder.fcmp_ordered("olt", x, lowest)
    bounded = builder.select(below, lowest, x)
    shifted = fma(builder, bounded, constant(1.44269504088896341), magic)
    whole = builder.fsub(shifted, magic)
    rest = fma(builder, whole, constant(-0.693359375), bounded)
    rest = fma(builder, whole, constant(2.12194440e-4), rest)
    exponent = builder.shl(builder.bitcast(shifted, INTS), constant(23, INTS))
    power = builder.bitcast(builder.add(exponent, constant(0x3F800000, INTS)), VECTOR)
    return builder.select(below, constant(0.0), builder.fmul(_series(builder, rest, _EXP), power))


_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
"""The polynomial coefficients of tanh(x) near 0, from tanhf in the Cephes library."""


def _tanh(builder: Any, x: Any) -> Any:
    """Generate code for tanh(x) as ``1 - 2 / (e ** 2x + 1)``, or near 0 as a polynomial, which is more exact there."""
    power = _exp(builder, builder.fmul(_within(builder, x, 20.0), constant(2.0)))
    far = builder.fsub(constant(1.0), builder.fdiv(constant(2.0), builder.fadd(power, constant(1.0))))
    square = builder.fmul(x, x)
    near = fma(builder, builder.fmul(_series(builder, square, _TANH), square), x, x)
    return builder.select(builder.fcmp_ordered("olt", square, constant(0.390625)), near, far)


_ERF = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
_ERF_BELOW = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)
"""The denominator of the Eigen library's rational approximation of erf on -4 ... 4; ``_ERF`` is the numerator."""


def _erf(builder: Any, x: Any) -> Any:
    x = _within(builder, x, 4.0)
    square = builder.fmul(x, x)
    near = builder.fdiv(builder.fmul(x, _series(builder, square, _ERF)), _series(builder, square, _ERF_BELOW))
    is_near = builder.fcmp_unordered("ult", square, constant(16.0))
    return builder.select(is_near, near, _within(builder, x, 1.0))


def _sigmoid(builder: Any, x: Any) -> Any:
    power = _exp(builder, _within(builder, builder.fneg(x), 88.0))
    return builder.fdiv(constant(1.0), builder.fadd(constant(1.0), power))


def _silu(builder: Any, x: Any) -> Any:
    power = _exp(builder, _within(builder, builder.fneg(x), 88.0))
    return builder.fdiv(x, builder.fadd(constant(1.0), power))


def _gelu(builder: Any, x: Any) -> Any:
    half = builder.fmul(constant(0.5), x)
    return builder.fmul(half, builder.fadd(constant(1.0), _erf(builder, builder.fmul(x, constant(0.5**0.5)))))


def _gelu_tanh(builder: Any, x: Any) -> Any:
    cube = builder.fmul(builder.fmul(x, x), x)
    inner = builder.fmul(constant(0.7978845608028654), fma(builder, cube, constant(0.044715), x))
    return builder.fmul(builder.fmul(constant(0.5), x), builder.fadd(constant(1.0), _tanh(builder, inner)))


def _quick_gelu(builder: Any, x: Any) -> Any:
    return builder.fmul(x, _sigmoid(builder, builder.fmul(x, constant(1.702))))


FUNCTIONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
}
"""The activation functions that `apply_function` supports. Each generates SIMD code for one vector of numbers."""


@for_kinds(*[types.int64] * 4)
def apply_function(builder: Any, kind: int, number: Any, source: Any, target: Any, count: Any) -> None:
    """Set ``target[i] = f(source[i])`` for ``count`` elements, where f is function number ``number`` in `FUNCTIONS`."""
    after = builder.append_basic_block("applied")
    chosen = builder.switch(number, after)
    for index, compute in enumerate(FUNCTIONS.values()):
        block = builder.append_basic_block("function")
        chosen.add_case(ir.Constant(WORD, index), block)
        builder.position_at_end(block)
        map_vectors(
            builder, count, [(source, kind)], [(target, kind)], lambda x, compute=compute: [compute(builder, x)]
        )
        builder.branch(after)
    builder.position_at_end(after)


def _scaled(source_kind: int | None, target_kind: int | None) -> Any:
    @for_kinds(types.int64, types.int64, types.int64, types.float32)
    def scale(builder: Any, kind: int, source: Any, target: Any, count: Any, factor: Any) -> None:
        by, (read_as, write_as) = splat(builder, factor), (kind if k is None else k for k in (source_kind, target_kind))
        map_vectors(builder, count, [(source, read_as)], [(target, write_as)], lambda x: [builder.fmul(x, by)])

    return scale


to_float32, from_float32 = _scaled(None, 0), _scaled(0, None)
"""Functions that convert ``count`` numbers from the dtype ``kind`` to float32, or back, and multiply by ``factor``."""


def _combined(instruction: str) -> Any:
    @for_kinds(*[types.int64] * 4)
    def combine(builder: Any, kind: int, a: Any, b: Any, target: Any, count: Any) -> None:
        operation = getattr(builder, instruction)
        map_vectors(builder, count, [(a, kind), (b, kind)], [(target, kind)], lambda x, y: [operation(x, y)])

    return combine


add_numbers, multiply_numbers = _combined("fadd"), _combined("fmul")
"""Functions that set ``target[i]`` to the sum or the product of ``a[i]`` and ``b[i]`` for ``count`` elements."""


@for_kinds(types.boolean, *[types.int64] * 4, types.float32)
def scale_by_weights(
    builder: Any, kind: int, rounds_first: Any, source: Any, weight: Any, target: Any, count: Any, factor: Any
) -> None:
    """Compute the last step of an RMS norm: ``target[i] = weight[i] * (source[i] * factor)`` for ``count`` elements.

    ``weight`` is float32. If ``rounds_first``, ``source[i] * factor`` is first rounded to the dtype ``kind``.
    """
    by = splat(builder, factor)

    def scaled(x: Any, weights: Any) -> Sequence[Any]:
        product = builder.fmul(x, by)
        return [builder.fmul(weights, builder.select(rounds_first, round_to_kind(builder, product, kind), product))]

    map_vectors(builder, count, [(source, kind), (weight, 0)], [(target, kind)], scaled)


@for_kinds(types.int64, types.int64, result=types.float32)
def sum_of_squares(builder: Any, kind: int, source: Any, count: Any) -> Any:
    """Return the sum of the squares of ``count`` numbers as float32. The numbers are summed in 16 SIMD lanes."""
    (found,) = map_vectors(
        builder, count, [(source, kind)], [], lambda x, total: [fma(builder, x, x, total)], [constant(0.0)]
    )
    return reduce_lanes(builder, found, builder.fadd)


@for_kinds(*[types.int64] * 5)
def rotate_pairs(builder: Any, kind: int, x: Any, cos: Any, sin: Any, target: Any, half: Any) -> None:
    """Apply rotary position embeddings to the ``2 * half`` numbers of one head, with the same rounding as transformers.

    Elements i and ``half + i`` are a pair, which is rotated by an angle.
    """
    second = (half, ITEMSIZES[kind])
    sources = [
        (place, kind) for address in (x, cos, sin) for place in (address, offset_address(builder, address, second))
    ]

    def product(a: Any, b: Any) -> Any:
        return round_to_kind(builder, builder.fmul(a, b), kind)

    def rotate(low: Any, high: Any, cos_low: Any, cos_high: Any, sin_low: Any, sin_high: Any) -> Sequence[Any]:
        return [
            builder.fsub(product(low, cos_low), product(high, sin_low)),
            builder.fadd(product(high, cos_high), product(low, sin_high)),
        ]

    map_vectors(builder, half, sources, [(target, kind), (offset_address(builder, target, second), kind)], rotate)


def _over_vectors(result: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that turns a generator of SIMD code into a numba function for float32 arrays.

    The decorated ``generate(builder, address, vectors, number)`` processes ``vectors`` vectors of 16 numbers at an
    address.
    """

    def make(generate: Callable[..., Any]) -> Any:
        def typed(_typing: Any, _address: Any, _vectors: Any, _number: Any) -> Any:
            def build(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
                found = generate(builder, *args)
                return context.get_dummy_value() if result is types.none else found

            return result(types.int64, types.int64, types.float32), build

        typed.__name__ = generate.__name__
        return intrinsic(typed)

    return make


def higher(builder: Any, x: Any, y: Any) -> Any:
    """Generate code for the maximum in each lane of two SIMD vectors, NaN if one of the numbers is NaN."""
    is_y = builder.or_(builder.fcmp_ordered("olt", x, y), builder.fcmp_unordered("uno", y, y))
    return builder.select(is_y, y, x)


@_over_vectors(types.float32)
def highest_of(builder: Any, address: Any, vectors: Any, least: Any) -> Any:
    """Return the maximum of ``least`` and all numbers of a float32 array; NaN if one of the numbers is NaN."""

    def body(index: Any, highest: Sequence[Any]) -> Sequence[Any]:
        return [higher(builder, highest[0], read(builder, offset_address(builder, address, (index, 4 * LANES)), 0))]

    (found,) = loop(builder, vectors, [splat(builder, least)], body)
    return reduce_lanes(builder, found, partial(higher, builder))


@_over_vectors(types.float32)
def exp_and_sum(builder: Any, address: Any, vectors: Any, highest: Any) -> Any:
    """Replace every number x of a float32 array by ``e ** (x - highest)``, as in a softmax, and return the sum."""
    subtracted = splat(builder, highest)

    def body(index: Any, total: Sequence[Any]) -> Sequence[Any]:
        place = offset_address(builder, address, (index, 4 * LANES))
        found = _exp(builder, builder.fsub(read(builder, place, 0), subtracted))
        write(builder, found, place, 0)
        return [builder.fadd(total[0], found)]

    (total,) = loop(builder, vectors, [constant(0.0)], body)
    return reduce_lanes(builder, total, builder.fadd)


@_over_vectors(types.none)
def soft_cap(builder: Any, address: Any, vectors: Any, limit: Any) -> None:
    """Replace every number x of a float32 array by ``limit * tanh(x / limit)``, which is between -limit and limit."""
    limits = splat(builder, limit)

    def body(index: Any, _carried: Sequence[Any]) -> Sequence[Any]:
        place = offset_address(builder, address, (index, 4 * LANES))
        x = builder.fdiv(read(builder, place, 0), limits)
        write(builder, builder.fmul(_tanh(builder, x), limits), place, 0)
        return []

    loop(builder, vectors, [], body)
