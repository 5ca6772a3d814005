"""For how long places go on alike: packed text compared some tokens at a time, against one token at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.compiled.records import Records
from ssd.drafting.suffix.agreement import MOST_IN_COMMON, num_unanimous
from ssd.drafting.suffix.gather import NOTHING, Evidence, Texts
from tests.reference.drafting import make_snapshot

SEPARATOR = -1
WIDE = {2: 1, 3: 70_000, 4: 17_000_000}  # an id of a segment of this width, so that it has to have it


def going_on(text: list[int], at: int, passed: int, is_own: bool) -> list[int]:
    """What stands behind a place, up to the end of its sequence; own text goes on from its own begin."""
    behind = [text[at + (depth % (len(text) - at) if is_own else depth)] for depth in range(passed + 20)
              if is_own or at + depth < len(text)]  # fmt: skip
    return [*behind[passed:], NOTHING]


@settings(max_examples=150)
@given(st.data())
def test_places_are_compared_as_one_token_after_the_other(data: st.DataObject) -> None:
    common = data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=14))
    kinds, places, widths, said = [], [], [], []
    parts, starts = [], []
    passed = data.draw(st.integers(0, min(3, len(common) - 1)))
    for _ in range(data.draw(st.integers(1, 5), label="segments")):
        begin = data.draw(st.lists(st.integers(0, 2), max_size=4))
        end = data.draw(st.lists(st.integers(0, 2), max_size=4))
        wide = WIDE[data.draw(st.sampled_from([2, 3, 4]))]
        parts.append([*begin, *common, *end, SEPARATOR, wide, SEPARATOR])
        starts.append(len(begin))
    tail = [*common, *data.draw(st.lists(st.integers(0, 2), max_size=4)), SEPARATOR]
    context = [*common, *data.draw(st.lists(st.integers(0, 2), max_size=4))]
    snapshot = make_snapshot(parts, tail)
    for lane, (part, start) in enumerate(zip(parts, starts, strict=True)):
        address, width = snapshot.segment_table.records[lane].text, snapshot.segment_table.records[lane].width
        kinds.append(0)
        places.append(address + width * start)
        widths.append(width)
        said.append(going_on(part[: part.index(SEPARATOR) + 1], start, passed, False))
    kinds += [1, 2]
    places += [snapshot.tail_start, 0]
    widths += [0, 0]
    said += [going_on(tail, 0, passed, False), going_on(context, 0, passed, True)]
    chosen = data.draw(st.permutations(range(len(kinds))))[: data.draw(st.integers(1, len(kinds)))]
    most = data.draw(st.integers(1, 12), label="most")

    evidence = Records(Evidence).array[0]
    for name, values in (("kind", kinds), ("at", places), ("width", widths)):
        evidence[name][: len(values)] = values
    texts = Texts(np.array(context, np.int32), snapshot.ring, snapshot.tail_start, snapshot.tail_stop)
    alive = np.array(chosen, np.int64)
    got = num_unanimous(texts, evidence, alive, len(alive), passed, most)
    want = 0
    while want < min(most, MOST_IN_COMMON):
        tokens = {said[sample][want] for sample in chosen}
        if len(tokens) > 1 or min(tokens) < 0:
            break
        want += 1
    assert got == want
