"""Draft methods of other projects, replayed on the same log as SSD's drafter, for ``ssd-cache evaluate --against``.

Each method is the code of its own project, called as vLLM or transformers call it, and drafts chains. It runs at its
default setting and at some others; the report also shows the setting that turned out best on this log, which nobody can
know in advance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from cache_builder.evaluation.costs import StepCosts
from cache_builder.evaluation.evaluate import Outcome, Plan, figures_of, replay
from cache_builder.evaluation.log import Log, TokenIds
from ssd.drafting.protocol import Draft
from ssd.errors import ConfigError

_DEPTH: Final = 24  # vLLM's default
_CACHED_REQUESTS: Final = 10_000  # vLLM's default


class Peer:
    """A draft method of another project with one setting. It replays one request at a time."""

    def start(self, prompt: TokenIds) -> None:
        """Begin a request."""

    def propose(self, context: TokenIds) -> Sequence[int]:
        """Return a draft chain for a request; ``context`` is its prompt and its output so far."""
        raise NotImplementedError

    def extend(self, token_ids: TokenIds) -> None:
        """Add output tokens to the request."""

    def finish(self) -> None:
        """End the request; a method with a cache adds the request's output to its cache."""


class SuffixPeer(Peer):
    """vLLM's ``suffix`` method, which drafts from suffix trees of the request's text and of earlier outputs."""

    def __init__(self, longest: int, *, tokens: int = _DEPTH, factor: float = 1.0) -> None:
        library = import_module("arctic_inference.suffix_decoding")
        self._cache = library.SuffixDecodingCache(_DEPTH, _CACHED_REQUESTS)
        self._tokens, self._factor, self._number = tokens, factor, 0

    def start(self, prompt: TokenIds) -> None:
        self._number += 1
        self._cache.start_request(self._number, prompt)

    def propose(self, context: TokenIds) -> Sequence[int]:
        draft = self._cache.speculate(
            self._number,
            np.ascontiguousarray(context[-_DEPTH:]),
            max_spec_tokens=self._tokens,
            max_spec_factor=self._factor,
            min_token_prob=0.1,
        )
        token_ids: Sequence[int] = draft.token_ids
        return token_ids

    def extend(self, token_ids: TokenIds) -> None:
        self._cache.add_active_response(self._number, np.ascontiguousarray(token_ids))

    def finish(self) -> None:
        self._cache.stop_request(self._number)


class NgramPeer(Peer):
    """vLLM's ``ngram`` method, which drafts the tokens after an earlier occurrence of the request's last tokens."""

    def __init__(self, longest: int, *, tokens: int = 5, least: int = 5, most: int = 5) -> None:
        library = import_module("vllm.v1.spec_decode.ngram_proposer")
        length = longest + tokens + 1
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(
                prompt_lookup_min=least, prompt_lookup_max=most, num_speculative_tokens=tokens
            ),
            model_config=SimpleNamespace(max_model_len=length),
            scheduler_config=SimpleNamespace(max_num_seqs=1),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
        self._proposer, self._tokens = library.NgramProposer(config), tokens
        self._token_ids, self._num_tokens = np.zeros((1, length), np.int32), np.zeros(1, np.int32)

    def propose(self, context: TokenIds) -> Sequence[int]:
        self._token_ids[0, : len(context)], self._num_tokens[0] = context, len(context)
        sampled = [[int(context[-1])]]
        drafts: list[list[int]] = self._proposer.propose(self._tokens, sampled, self._num_tokens, self._token_ids)
        return drafts[0]


class LookupPeer(Peer):
    """transformers' prompt lookup, which drafts the tokens after the first occurrence of the request's last tokens."""

    def __init__(self, longest: int, *, tokens: int = 10, most: int = 2) -> None:
        self._torch = import_module("torch")
        library = import_module("transformers.generation.candidate_generator")
        self._generator = library.PromptLookupCandidateGenerator(
            num_output_tokens=tokens, max_matching_ngram_size=most, max_length=longest + tokens + 1
        )

    def propose(self, context: TokenIds) -> Sequence[int]:
        candidates, _ = self._generator.get_candidates(self._torch.from_numpy(context.astype(np.int64)[None]))
        draft: list[int] = candidates[0, len(context) :].tolist()
        return draft


_Settings = Sequence[Mapping[str, Any]]
PEERS: Final[dict[str, tuple[Callable[..., Peer], str, str, _Settings]]] = {
    "suffix": (
        SuffixPeer,
        "arctic_inference",
        "pip install arctic-inference, which needs a C++ compiler",
        [{}, {"tokens": 8, "factor": 3.0}, {"tokens": 11, "factor": 2.0}, {"tokens": 24, "factor": 4.0}],
    ),
    "ngram": (
        NgramPeer,
        "vllm",
        "run ssd-cache in vLLM's environment, or pip install vllm",
        [{}, {"tokens": 5, "least": 2}, {"tokens": 10, "least": 2}, {"tokens": 16, "least": 3}],
    ),
    "lookup": (
        LookupPeer,
        "torch",
        "pip install transformers torch",
        [{}, {"tokens": 5}, {"tokens": 10, "most": 3}, {"tokens": 16, "most": 3}],
    ),
}
"""Maps each value of ``--against`` to the class of the draft method, the package that this class imports, advice how to
install this package, and the settings to replay. The empty setting is the method's default.
"""


def require_peers(names: Sequence[str]) -> None:
    """Raise ConfigError if the package of a draft method is not installed."""
    for name in names:
        _, package, install, _ = PEERS[name]
        try:
            import_module(package)
        except ImportError as error:
            raise ConfigError(f"--against {name} needs the package {package} ({error}): {install}") from error


def compare(
    log: Log,
    plan: Plan,
    costs: StepCosts,
    evaluation: Mapping[str, Any],
    names: Sequence[str],
    *,
    progress: Callable[[int], object] = lambda num_tokens: None,
) -> list[dict[str, Any]]:
    """Replay a log with other draft methods and with SSD, and return one row of figures for each method and setting.

    SSD has two rows: with draft trees, copied from ``evaluation``, the result of `evaluate` for the same log, and with
    draft chains. Each other method in ``names`` has two rows: with its default setting, and with the setting that has
    the largest speed-up. O(settings * tokens).
    """
    chains = figures_of(costs, None, replay(log, replace(plan, tree=False), costs.curve, plan.cache, progress))
    trees = {key: evaluation[key] for key in chains}
    rows = [
        {"method": "ssd", "setting": f"default, draft {way}", **of}
        for way, of in (("trees", trees), ("chains", chains))
    ]
    for name in names:
        some = [
            {"method": name, "setting": shown, **figures_of(costs, None, replay_peer(log, peer, progress))}
            for shown, peer in _make_peers(name, int(np.diff(log.starts).max()))
        ]
        best = max(some, key=lambda row: row["speedup"])
        rows += [some[0], {**best, "setting": f"best of {len(some)} on this log: {best['setting']}"}]
    return rows


def count_compared_tokens(log: Log, names: Sequence[str]) -> int:
    """Return the number of output tokens that `compare` replays, for its progress bar."""
    return int(log.output_lengths[log.replayable].sum()) * (1 + sum(len(PEERS[name][3]) for name in names))


def _make_peers(name: str, longest: int) -> Iterator[tuple[str, Peer]]:
    kind, _, _, settings = PEERS[name]
    for setting in settings:
        shown = ", ".join(f"{key} {value:g}" for key, value in setting.items())
        yield shown or "default", kind(longest, **setting)


def replay_peer(log: Log, peer: Peer, progress: Callable[[int], object]) -> Outcome:
    """Replay all requests of a log with another draft method, one after the other, and count the decoding steps."""
    steps, drafted, ns = list[tuple[int, int, int]](), list[int](), 0
    for number in log.replayable.tolist():
        row = log.row(number)
        text, position, num_steps = row.text(), len(row.context), 0
        peer.start(row.context)
        while position < len(text):
            began = time.thread_time_ns()
            draft = np.asarray(peer.propose(text[:position]), np.int32)
            ns += time.thread_time_ns() - began
            num_agreeing = len(Draft(draft).path_of(text[position:]))
            end = position + min(num_agreeing + 1, len(text) - position)
            peer.extend(text[position:end])
            drafted.append(len(draft))
            position, num_steps = end, num_steps + 1
        peer.finish()
        steps.append((number, num_steps, len(row.output) - num_steps))
        progress(len(row.output))
    requests, nums, accepted = np.array(steps, np.int64).reshape(-1, 3).T.copy()
    widths = np.array(drafted, np.int16)
    return Outcome(requests, log.output_lengths[requests], nums, accepted, widths, ns, {}, 0, 0, 0)
