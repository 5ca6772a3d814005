"""``ssd-cache explain``: what would be drafted after a text, from which places, and why no more."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from cache_builder.commands.options import CACHE_DIRECTORY, codec_of
from cache_builder.held import Decode, learned_of, manifest_of, percent, shown
from cache_builder.inputs.record import InputError, shown_name
from cache_builder.inputs.streams import open_raw, readable
from ssd.bundled import MODEL_PATH
from ssd.config import MAX_SPECULATIVE_TOKENS, DraftConfig
from ssd.drafting.acceptance_model import AcceptanceModel
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.protocol import DraftRequest
from ssd.drafting.seen import CONTEXT_END, OWN_TEXT, Candidate, Lookup, Place, Seen, path_to, see
from ssd.errors import CacheError, ConfigError, StoreUnavailable, TokenizerMismatch
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.directory import load_segments
from ssd.retrieval.ring import blocks_of
from ssd.retrieval.segment import SEPARATOR, unpack
from ssd.retrieval.snapshot import Snapshot, make_snapshot, segment_table
from ssd.text.codec import TextCodec

_DESCRIPTION = """\
What would be drafted after a text from a cache, and why: the draft as a tree with the chance of every token, why it
ends where it does, and the places that it was made of. It is what the servers' own drafter does at that text.

FILE is text; a name that ends in .json holds the body of a request, {"messages": [...]} or {"prompt": "..."}. A text is
taken as it is, as /v1/completions does; a chat is what the model's template makes of messages, so the same words as
text and as a chat end in other tokens, and other drafts.
"""

_UNKNOWN: Final = (
    "A server knows more: text it has not sealed yet, what other requests say just now, what its model held likely "
    "before, and its own price of a token, measured."
)

_OWN: Final = "own text"
_SHOWN_TOKENS: Final = 12
_TAIL_TOKENS: Final = 24
_MOST_PLACES: Final = 8
_MOST_LEFT_OUT: Final = 2
_LEAST_SHOWN: Final = 0.005
_MOST_VIEWED: Final = 2

_MOST_BYTES: Final = 64 << 20
_LARGEST_ID: Final = 2**31 - 2


def add(command: argparse.ArgumentParser) -> None:
    """Its arguments."""
    command.description = _DESCRIPTION
    command.add_argument("directory", type=Path, metavar="DIR", help=CACHE_DIRECTORY)
    text = command.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", metavar="FILE", help="the prompt; - is standard input")
    text.add_argument("--token-ids", metavar="FILE", help="prompt and output as a JSON array of ids")
    command.add_argument("--output", metavar="FILE", help="what was said after the prompt so far")
    command.add_argument(
        "--tokenizer", metavar="DIR_OR_MODEL", help="the served model's (default: the bundled model's)"
    )
    command.add_argument(
        "--draft-limit", type=int, default=DraftConfig().num_speculative_tokens, metavar="K",
        help=f"most tokens of the draft, 1 to {MAX_SPECULATIVE_TOKENS} (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--shape", choices=("tree", "chain"), default="tree",
        help="a server drafts trees for one sequence alone, chains for many (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--price", type=float, default=0.1, metavar="P",
        help="what drafting a token costs, in accepted tokens; a server measures it (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print the explanation."""
    codec = codec_of(options)
    if options.prompt is not None:
        codec = codec or TextCodec.load(str(MODEL_PATH))
        prompt = _prompt_of(options.prompt, codec)
        output = [] if options.output is None else codec.encode_completion(_read(options.output))
    else:
        if options.output is not None:
            raise ConfigError("--output goes with --prompt: append its ids to those of --token-ids")
        prompt, output = _token_ids_of(options.token_ids), []
    context, limit = [*prompt, *output], options.draft_limit
    if not 1 <= limit <= MAX_SPECULATIVE_TOKENS:
        raise ConfigError(f"the draft limit must be within 1..{MAX_SPECULATIVE_TOKENS}, got {limit}")
    if not 0.0 < options.price < 1.0:
        raise ConfigError(f"the price of a token must be above 0 and below 1 accepted token, got {options.price:g}")
    if not context:
        raise ConfigError("there is no text to go on from: give a prompt of at least one token")
    snapshot = _open(options.directory, None if codec is None else codec.fingerprint)
    learned, learned_from = _learned(options.directory)
    config = DraftConfig()
    drafter = SuffixDrafter(
        max_match_length=config.max_match_length, min_match_length=config.min_match_length, recycling=False
    )
    request = DraftRequest(
        "explained", np.array(context, np.int32), len(prompt), snapshot, limit, tree=options.shape == "tree",
        learned=learned,
    )  # fmt: skip
    seen = see(drafter, request, options.price)
    facts = {
        "report": "explain",
        "path": str(options.directory),
        "prompt_tokens": len(prompt),
        "output_tokens": len(output),
        "shape": options.shape,
        "draft_limit": limit,
        "price": options.price,
        "learned_from": learned_from,
        "segments": len(snapshot.segments),
        "index_tokens": sum(
            int(np.count_nonzero(block != SEPARATOR)) for each in snapshot.segments for block in blocks_of(each)
        ),
    }
    if options.json:
        print(json.dumps({**facts, **_as_json(seen)}, indent=1))
    else:
        print("\n".join(_Text(seen, facts, context, snapshot, None if codec is None else codec.decode).lines()))
    return 0


def _open(path: Path, fingerprint: str | None) -> Snapshot:
    """All of a directory, as the server finds it that keeps it, or is given it to warm up."""
    manifest = manifest_of(path)
    own = manifest.fingerprint
    if fingerprint is not None and fingerprint != own:
        raise TokenizerMismatch(
            f"{path} was made with tokenizer {own}, this one is {fingerprint}: its token ids mean other text. Give the "
            "tokenizer it was made with"
        )
    segments, failures = load_segments(path, manifest)
    for failure in failures:
        if isinstance(failure, CacheError):
            raise failure
        raise StoreUnavailable(f"{path} is incomplete: {failure}. Copy or build it again") from failure
    return make_snapshot(0, tuple(segments), segment_table(segments), np.zeros(1, np.int32), 0, 0)


def _learned(path: Path) -> tuple[LearnedState, int | None]:
    """What the directory's learned.bin says, and from how many candidates; nothing and None where it cannot be used."""
    stored = learned_of(path)
    try:
        return LearnedState(stored), None if stored is None else AcceptanceModel.from_bytes(stored).num_learned
    except ValueError:  # as a server does; `check` says what is wrong with it
        return LearnedState(None), None


def _as_json(seen: Seen) -> dict[str, Any]:
    """The draft, why it ended, and all that was looked up and judged."""
    draft = seen.draft
    return {
        "draft": {
            "token_ids": draft.token_ids.tolist(),
            "parents": draft.parents_of_all(),
            "chances": [] if draft.probabilities is None else draft.probabilities.tolist(),
            "products": _products(seen),
            "source": draft.source,
            "match_length": draft.match_length,
        },
        "ended": seen.ended,
        "lookups": [asdict(lookup) for lookup in seen.lookups],
        "positions": [asdict(position) for position in seen.positions],
    }


def _products(seen: Seen) -> list[float]:
    return seen.draft.chances().tolist() if len(seen.draft.token_ids) else []


@dataclass(frozen=True, slots=True)
class _Text:
    """The draft as a tree with its chances, why it ends, and the places it was made of, for people."""

    seen: Seen
    facts: dict[str, Any]
    context: Sequence[int]
    snapshot: Snapshot
    decode: Decode

    def lines(self) -> Iterator[str]:
        facts, seen = self.facts, self.seen
        yield f"{facts['path']}: {facts['index_tokens']:,} tokens in {facts['segments']} segments; " + (
            f"chances as learned from {facts['learned_from']:,} candidates"
            if facts["learned_from"]
            else "nothing was learned about acceptance yet, chances are by rule of thumb"
        )
        output = f" and {facts['output_tokens']:,} of output" if facts["output_tokens"] else ""
        yield f"the text: {facts['prompt_tokens']:,} tokens of prompt{output}, ending {self.end(_TAIL_TOKENS)}"
        yield from self.matches()
        yield ""
        size, ended = len(seen.draft.token_ids), self.why_ended()
        if size:
            yield (
                f"draft: a {facts['shape']} of {size} tokens from {seen.draft.source!r}, of which "
                f"{sum(_products(seen)):.1f} are expected to be accepted, at a price of {facts['price']:g} each"
            )
        else:
            yield f"no draft: {ended}"
        if any(position.candidates for position in seen.positions):
            yield "  chance   with all   votes         token (- left out)"
            yield "           before it"
        yield from self.below(CONTEXT_END, 0)
        if size:
            yield f"it ends here: {ended}"
        yield from self.views()
        for lookup in seen.lookups:
            if lookup.lengths:
                yield from self.places(lookup)
        yield from ("", _UNKNOWN)

    def end(self, count: int) -> str:
        return shown(self.context[-count:], self.decode)

    def matches(self) -> Iterator[str]:
        """How often ends of the text stand elsewhere."""
        first = self.seen.lookups[0]
        for level, length in enumerate(first.lengths):
            places = [place for place in first.places if place.level == level]
            own = sum(place.weight for place in places if place.segment == OWN_TEXT)
            index = sum(place.weight for place in places if place.segment != OWN_TEXT)
            if own + index:  # else the places are those of the longer match
                at_least = "at least " if any(place.weight > 1.0 for place in places) else ""
                yield (
                    f"  its last {length} tokens {self.end(min(length, _TAIL_TOKENS))} stand elsewhere"
                    f"{' too' if level else ''}: {at_least}{index:.0f} in the cache, {own:.0f} in the text itself"
                )

    def why_ended(self) -> str:
        if self.seen.ended == "limit":
            return f"the draft limit of {self.facts['draft_limit']} tokens is reached"
        if (left := self.seen.best_left_out()) is not None:
            return (
                f"the most probable token left out is {shown([left.token_id], self.decode)}: it comes, with all before "
                f"it, in {percent(left.product)} of cases, and drafting it costs {self.facts['price']:g} of an "
                "accepted token"
            )
        if not self.seen.lookups[0].lengths:
            return "the last token stands nowhere else, neither in the cache nor earlier in the text"
        return "the texts that agree with the draft end there, and what the draft ends with stands nowhere else"

    def below(self, after: int, indent: int) -> Iterator[str]:
        """What comes after a node; further in only where it branches."""
        position = self.seen.positions[after + 1]
        support = sum(position.own_support) + sum(position.index_support)

        def line(candidate: Candidate) -> str:
            said = f"{sum(candidate.own_votes) + sum(candidate.index_votes):.0f} of {support:.0f}"
            mark = "  " * indent + ("- " if candidate.node is None else "")
            chances = f"{percent(candidate.chance):>6}   {percent(candidate.product):>9}"
            return f"  {chances}   {said:<12}  {mark}{shown([candidate.token_id], self.decode)}"

        taken = [(each.node, each) for each in position.candidates if each.node is not None]
        left = [each for each in position.candidates if each.node is None and each.product >= _LEAST_SHOWN]
        is_branch = len(taken) > 1
        if not is_branch:
            yield from (line(each) for _, each in taken)
        yield from map(line, left[:_MOST_LEFT_OUT])
        for node, candidate in taken:
            if is_branch:
                yield line(candidate)
            yield from self.below(node, indent + is_branch)

    def views(self) -> Iterator[str]:
        candidates = self.seen.positions[0].candidates
        if candidates:
            yield ""
            yield "where the chance of the first token comes from: what each view says, and how much it counts"
        for candidate in candidates[:_MOST_VIEWED]:
            views = sorted(candidate.views, key=lambda view: -abs(view.weight))
            said = ", ".join(f"{view.name} {percent(view.chance)} ({view.weight:.2f})" for view in views)
            yield f"  {shown([candidate.token_id], self.decode)} {percent(candidate.chance)}: {said}"

    def places(self, lookup: Lookup) -> Iterator[str]:
        count = len(lookup.places)
        where = "the end of the text" if lookup.after == CONTEXT_END else "the draft's end, looked up again,"
        yield ""
        yield f"places where {where} stands as well" + (f", {_MOST_PLACES} of {count}" if count > _MOST_PLACES else "")
        for place in lookup.places[:_MOST_PLACES]:
            stands_for = f" (stands for {place.weight:.0f})" if place.weight > 1.5 else ""
            name = _OWN if place.segment == OWN_TEXT else self.snapshot.segments[place.segment].segment_id
            before, goes_on = self.before(place, lookup), place.goes_on[:_SHOWN_TOKENS]
            yield (
                f"  {lookup.lengths[place.level]:3} tokens  {name} at {place.position:,}{stands_for}: "
                f"{shown(before, self.decode)} > {shown(goes_on, self.decode)}"
            )

    def before(self, place: Place, lookup: Lookup) -> list[int]:
        """The last tokens before a place."""
        first = max(0, place.position - _SHOWN_TOKENS)
        if place.segment == OWN_TEXT:
            drafted = self.seen.draft.token_ids[path_to(lookup.after, self.seen.draft)].tolist()
            return [*self.context, *drafted][first : place.position]
        segment = self.snapshot.segments[place.segment]
        tokens: list[int] = unpack(segment.text, place.position - first, segment.width, start=first).tolist()
        return tokens[max((i + 1 for i, token in enumerate(tokens) if token < 0), default=0) :]


def _prompt_of(name: str, codec: TextCodec) -> list[int]:
    """The ids of the text in the file ``name``, as a server makes them; - is standard input.

    A name that ends in .json holds the body of a request, {"messages": [...]} or {"prompt": "..."}, or the messages
    alone; anything else is text. Raises InputError, RequestError.
    """
    text = _read(name)
    if not name.endswith(".json"):
        return codec.encode_prompt(text)
    body = _json(name, text)
    if isinstance(body, list):
        return codec.encode_chat(body)
    if isinstance(body, dict) and isinstance(body.get("messages"), list):
        kwargs = body.get("chat_template_kwargs") or {}
        if not isinstance(kwargs, dict):
            raise InputError(f'{name}: "chat_template_kwargs" must be an object, got {type(kwargs).__name__}')
        return codec.encode_chat(body["messages"], template_kwargs=kwargs)
    if isinstance(body, dict) and isinstance(body.get("prompt"), str):
        return codec.encode_prompt(body["prompt"])
    raise InputError(f'{name}: expected {{"messages": [...]}} or {{"prompt": "..."}}; text goes into a file named .txt')


def _token_ids_of(name: str) -> list[int]:
    """A JSON array of ids, or {"token_ids": [...]} as ``inspect --sequences`` prints them. Raises InputError."""
    body = _json(name, _read(name))
    ids: Any = body.get("token_ids") if isinstance(body, dict) else body
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each <= _LARGEST_ID for each in ids):
        raise InputError(f"{name}: expected one JSON array of token ids from 0 to {_LARGEST_ID}")
    return ids


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not JSON ({error}). Correct it") from None


def _read(name: str) -> str:
    with readable(name), open_raw(name) as file:
        content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise InputError(
                f"{shown_name(name)}: more than {_MOST_BYTES >> 20} MiB, longer than any prompt: give less of it"
            )
        return content.decode("utf-8-sig")
