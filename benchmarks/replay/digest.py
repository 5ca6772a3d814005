"""Compute digests of all drafts on recorded traces, to check that a change of the code does not change any draft.

Run ``python -m benchmarks.replay --digest`` before and after the change, and compare the output. A digest covers the
tokens, parents, acceptance probabilities, source and match length of every draft, and the final acceptance model. There
is one digest for each way to draft: one request at a time with chains and with trees; several requests per call with
token costs and predictions; and the rows of `BatchDrafter`, with made-up step times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from benchmarks.traces import read_rows, trace_name
from cache_builder.evaluation.log import RecordedOutput, TokenIds
from ssd.config import CacheConfig, IndexConfig
from ssd.drafting import Draft, DraftRequest
from ssd.drafting.batch_drafter import BatchDrafter
from ssd.drafting.protocol import DraftOutcome
from ssd.drafting.row_texts import NUM_HEADER_WORDS, RowText
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.retrieval.cache_manager import CacheManager, NamespaceCache
from ssd.retrieval.cache_state import LearnedState

_LIMIT = 16
_AT_ONCE = 6
_PRICES = (None, np.array([0.02]), np.linspace(0.01, 0.3, 9))
_INDEX = IndexConfig(capacity_tokens=1 << 18)


class _Digest:
    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()
        self.num_drafts = 0

    def add(self, draft: Draft) -> None:
        self.num_drafts += 1
        self._state.update(f"{len(draft.token_ids)} {draft.match_length} {draft.source}".encode())
        for array in (draft.token_ids, draft.probabilities, draft.parents):
            self._state.update(b"-" if array is None else np.ascontiguousarray(array).tobytes())

    def add_bytes(self, data: bytes) -> None:
        self._state.update(data)

    def line(self) -> str:
        return f"{self.num_drafts} {self._state.hexdigest()}"


def _batches(
    rows: Sequence[RecordedOutput], cache: NamespaceCache, at_once: int
) -> Iterator[tuple[list[TokenIds], list[int]]]:
    """Yield the texts and prompt lengths of ``at_once`` requests at a time; then add these texts to the cache."""
    for first in range(0, len(rows), at_once):
        some = rows[first : first + at_once]
        texts = [np.concatenate([row.context, row.output]) for row in some]
        yield texts, [len(row.context) for row in some]
        for text, row in zip(texts, some, strict=True):
            cache.append(text, prompt_length=len(row.context))
        cache.maintain()


def _asked(rows: Sequence[RecordedOutput], *, at_once: int, tree: bool = False) -> _Digest:
    """Draft with `SuffixDrafter`, ``at_once`` requests per call, some of them with token costs or a prediction."""
    digest, drafter = _Digest(), SuffixDrafter()
    with CacheManager(CacheConfig(index=_INDEX), "0" * 32, inline=True) as caches:
        for number, (texts, prompts) in enumerate(_batches(rows, caches.get(), at_once)):
            snapshot = caches.get().snapshot()
            at = [max(1, prompt) for prompt in prompts]
            while going := [i for i, text in enumerate(texts) if at[i] < len(text)]:
                requests = [
                    DraftRequest(
                        f"{number}-{i}",
                        texts[i][: at[i]],
                        prompts[i],
                        snapshot,
                        _LIMIT - i % 3,
                        allow_tree=tree,
                        token_costs=_PRICES[i % 3],
                        prediction=texts[i][prompts[i] + 7 :] if i % 4 == 1 else None,
                    )
                    for i in going
                ]
                for i, draft in zip(going, drafter.propose(requests), strict=True):
                    digest.add(draft)
                    accepted = len(draft.path_of(texts[i][at[i] :]))
                    drafter.observe([DraftOutcome(f"{number}-{i}", draft, accepted)])
                    at[i] += accepted + 1
            for i in range(len(texts)):
                drafter.finish(f"{number}-{i}")
    digest.add_bytes(drafter.model_of(None).to_bytes())
    return digest


def _rows(rows: Sequence[RecordedOutput]) -> _Digest:
    """Draft with `BatchDrafter`, whose rows keep their texts until the batch ends."""
    digest, learned = _Digest(), LearnedState()
    width = max((len(row.context) + len(row.output) for row in rows), default=1) + 1
    drafter = BatchDrafter(longest=_LIMIT, max_length=width, vocab_size=1 << 30, end_of_text_ids=(2,), learned=learned)
    words, said = drafter.new_words(_AT_ONCE), np.zeros((_AT_ONCE, NUM_HEADER_WORDS + _LIMIT + 1), np.int32)
    with CacheManager(CacheConfig(index=_INDEX), "0" * 32, inline=True) as caches:
        for texts, prompts in _batches(rows, caches.get(), _AT_ONCE):
            snapshot = caches.get().snapshot()
            at, count = [max(1, prompt) for prompt in prompts], len(texts)
            names = [RowText(text[: at[i]], prompts[i], len(text)) for i, text in enumerate(texts)]
            drafter.assign(names)
            seconds, wanted = 0.0, [True] * count
            while any(at[i] < len(text) for i, text in enumerate(texts)):
                drafter.draft(wanted, snapshot, words, _LIMIT, seconds)
                drafts = [row[NUM_HEADER_WORDS : NUM_HEADER_WORDS + row[1]] for row in words[:count].tolist()]
                for i, tokens in enumerate(drafts):
                    digest.add(draft := Draft(np.array(tokens, np.int32)))
                    accepted = len(draft.path_of(texts[i][at[i] :]))
                    taken = texts[i][at[i] : at[i] + accepted + 1]
                    at[i] += len(taken)
                    said[i, : NUM_HEADER_WORDS + len(taken)] = [at[i], len(taken), *taken]
                wanted = (said[:count, 1] > 0).tolist()
                drafter.append(names, said)
                seconds = 0.02 + 0.0004 * (count + sum(map(len, drafts)))
            drafter.clear()
    drafter.publish()
    digest.add_bytes(learned.newest.to_bytes() if learned.newest is not None else b"")
    return digest


def digests(max_output_tokens: int, trace: Path, tokenizer: Path) -> list[str]:
    """Return one line with a digest for each way to draft."""
    rows = read_rows(trace, tokenizer, max_output_tokens)
    ways: dict[str, Callable[[], _Digest]] = {
        "chain": lambda: _asked(rows, at_once=1),
        "tree": lambda: _asked(rows, at_once=1, tree=True),
        "together": lambda: _asked(rows, at_once=_AT_ONCE),
        "rows": lambda: _rows(rows),
    }
    return [f"{tokenizer.parent.name} {trace_name(trace)} {name} {way().line()}" for name, way in ways.items()]
