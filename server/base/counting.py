"""Compiled counting of the values in a JSON text before it is parsed, and of the accepted tokens of a prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from ssd.jit.addresses import Int64s, kernel

_QUOTE: Final = ord('"')
_BACKSLASH: Final = ord("\\")
_COMMA: Final = ord(",")
_COLON: Final = ord(":")
_BRACKET: Final = ord("[")
_BRACE: Final = ord("{")


def num_values(content: bytes | bytearray) -> int:
    """Return an upper bound of the number of values in a JSON text, without parsing the text. O(bytes).

    Commas, colons and brackets are counted, so that a huge body can be rejected before it is parsed. The interpreter's
    lock is released meanwhile.
    """
    return int(_num_values(np.frombuffer(content, np.uint8)))


@kernel
def _num_values(content: npt.NDArray[np.uint8]) -> int:
    count = 0
    in_string = False
    at, n = 0, len(content)
    while at < n:
        byte = content[at]
        at += 1
        if in_string:
            if byte == _BACKSLASH:
                at += 1
            elif byte == _QUOTE:
                in_string = False
        elif byte == _QUOTE:
            in_string = True
        elif byte in (_COMMA, _COLON, _BRACKET, _BRACE):
            count += 1
    return count


_WORD: Final = 64
_SIDES: Final[tuple[Literal["left", "right"], ...]] = ("left", "right")

Uint64s = npt.NDArray[np.uint64]


def common_tokens(prediction: Sequence[int], output: Sequence[int]) -> int:
    """Return the length of the longest common subsequence of a prediction and an output, in tokens.

    The API reports it as the number of accepted prediction tokens, because the number of accepted draft tokens would
    reveal the cache's content. At worst O(n log n + m n / 64) time, mostly without the interpreter's lock; O(n + m)
    memory.
    """
    wanted, found = np.array(prediction, np.int64), np.array(output, np.int64)
    if not (wanted.size and found.size):
        return 0
    places = np.argsort(wanted, kind="stable")
    tokens, words = wanted[places], places // _WORD
    begins = np.flatnonzero(np.diff(tokens, prepend=-1) | np.diff(words, prepend=-1))
    masks = np.bitwise_or.reduceat(np.uint64(1) << (places % _WORD).astype(np.uint64), begins)
    first, last = (np.searchsorted(tokens[begins], found, side) for side in _SIDES)
    return int(_common(words[begins], masks, first, last, len(wanted)))


@kernel
def _common(words: Int64s, masks: Uint64s, first: Int64s, last: Int64s, n: int) -> int:
    """Return the length of the longest common subsequence of a prediction of ``n`` tokens and an output.

    Bit-parallel algorithm (Hyyrö 2004, "Bit-parallel LCS-length computation revisited", section 4): each bit of ``row``
    stands for a token of the prediction. For each output token, ``row`` becomes (row + matched) | (row - matched),
    where ``matched`` are the bits of ``row`` at the token's positions in the prediction. In the end the zero bits are
    counted.

    ``row`` consists of words of 64 bits, lowest first. The positions of the j-th output token are the set bits of
    ``masks[i]`` in word ``words[i]`` for i from ``first[j]`` to ``last[j] - 1``, in ascending words. A word without a
    position changes only by a carry from the word below.
    """
    num_words = (n + _WORD - 1) // _WORD
    row = np.full(num_words, np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64)  # each zero bit is a matched token
    one, zero = np.uint64(1), np.uint64(0)
    for j in range(len(first)):
        at, stop = first[j], last[j]
        carry = zero
        word = -1
        while at < stop or carry:
            word = word + 1 if carry else words[at]
            if word == num_words:
                break
            mask = zero
            if at < stop and words[at] == word:
                mask = masks[at]
                at += 1
            before = row[word]
            matched = before & mask
            total = before + matched
            overflowed = total < before
            total += carry
            overflowed |= total < carry
            carry = one if overflowed else zero
            row[word] = total | (before - matched)
    count = 0
    for position in range(n):
        count += (row[position // _WORD] >> np.uint64(position % _WORD)) & one == zero
    return count
