from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.retrieval.packed import GUARD_BYTES, WIDTHS, pack, packed_size, unpack, width_for

LARGEST = {2: (1 << 16) - 2, 3: (1 << 24) - 2, 4: (1 << 31) - 1}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_width_is_the_narrowest_that_holds_the_largest_id(width: int) -> None:
    assert width_for(LARGEST[width]) == width
    if width < 4:
        assert width_for(LARGEST[width] + 1) == width + 1
    assert width_for(-1) == 2


@given(st.sampled_from(WIDTHS), st.data())
def test_what_is_packed_is_unpacked(width: int, data: st.DataObject) -> None:
    tokens = np.array(data.draw(st.lists(st.integers(-1, LARGEST[width]), max_size=100)), np.int32)
    packed = pack(tokens, width)
    assert len(packed) == packed_size(len(tokens), width) and len(packed) % 64 == 0
    assert unpack(packed, len(tokens), width).tolist() == tokens.tolist()
    assert not packed[:GUARD_BYTES].any() and not packed[GUARD_BYTES + width * len(tokens) :].any()


@given(st.sampled_from(WIDTHS), st.data())
def test_eight_bytes_before_a_position_order_it_by_the_text_before_it(width: int, data: st.DataObject) -> None:
    ids = st.one_of(st.integers(-1, 2), st.integers(-1, LARGEST[width]))
    tokens = data.draw(st.lists(ids, min_size=1, max_size=40))
    packed = pack(np.array(tokens, np.int32), width).tobytes()

    def word(position: int) -> int:
        end = GUARD_BYTES + width * position
        return int.from_bytes(packed[end - 8 : end], "little")

    whole = 8 // width  # codes that lie in a word altogether
    for one in range(1, len(tokens) + 1):
        for other in range(1, len(tokens) + 1):
            before = [([*tokens[:p][::-1], *[-1] * whole])[:whole] for p in (one, other)]
            if before[0] < before[1]:
                assert word(one) < word(other)


def test_a_block_boundary_changes_nothing() -> None:
    tokens = np.random.default_rng(0).integers(-1, 1 << 20, (1 << 16) + 7).astype(np.int32)
    assert np.array_equal(unpack(pack(tokens, 3), len(tokens), 3), tokens)
