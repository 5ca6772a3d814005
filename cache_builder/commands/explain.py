"""``ssd-cache explain``: what would be drafted after a text, from which places, and why no more."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from cache_builder.commands.options import CACHE_DIRECTORY, codec_of
from cache_builder.held import Decode, fingerprint_of, percent, read_learned, shown
from cache_builder.inputs.record import InputError, shown_name
from cache_builder.inputs.streams import open_raw, readable
from ssd.bundled import MODEL_PATH
from ssd.config import MAX_SPECULATIVE_TOKENS, DraftConfig
from ssd.drafting.acceptance_model import AcceptanceModel
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.protocol import DraftRequest
from ssd.drafting.seen import CONTEXT_END, OWN_TEXT, Lookup, Place, Seen, path_to, see
from ssd.errors import CacheError, ConfigError, StoreUnavailable, TokenizerMismatch
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.directory import load_segments
from ssd.retrieval.files import read_manifest
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
        "hint": _hint(options, codec, prompt, output),
    }
    decode = None if codec is None else codec.decode
    report = _report(see(drafter, request, options.price), facts, context, snapshot, decode)
    print(json.dumps(report, indent=1) if options.json else "\n".join(_as_text(report, context, decode)))
    return 0


def _hint(options: argparse.Namespace, codec: TextCodec | None, prompt: list[int], output: list[int]) -> str | None:
    """What a text that was given as a prompt may lack to be what the servers see."""
    if options.prompt is None or codec is None or options.prompt.endswith(".json") or output:
        return None
    said = []
    if codec.decode(prompt).endswith("\n"):
        said.append(
            "its last token holds the line feed that editors and `echo` put at the end: `printf %s` writes none"
        )
    if codec.has_chat_template:
        said.append(
            "a chat's prompt has the marks of the model's template around it, this text has none: for a chat give a "
            'file named .json with {"messages": [{"role": "user", "content": "..."}]}'
        )
    return "; ".join(said) or None


def _open(path: Path, fingerprint: str | None) -> Snapshot:
    """All of a directory, as the server finds it that keeps it, or is given it to warm up."""
    own = fingerprint_of(path)
    if fingerprint is not None and fingerprint != own:
        raise TokenizerMismatch(
            f"{path} was made with tokenizer {own}, this one is {fingerprint}: its token ids mean other text. Give the "
            "tokenizer it was made with"
        )
    manifest = read_manifest(path, fingerprint=own)
    if manifest is None:
        raise StoreUnavailable(f"{path} is being replaced at this moment: try again")
    segments, failures = load_segments(path, manifest)
    for failure in failures:
        if isinstance(failure, CacheError):
            raise failure
        raise StoreUnavailable(f"{path} is incomplete: {failure}. Copy or build it again") from failure
    return make_snapshot(0, tuple(segments), segment_table(segments), np.zeros(1, np.int32), 0, 0)


def _learned(path: Path) -> tuple[LearnedState, int | None]:
    """What the directory's learned.bin says, and from how many candidates; nothing and None where it cannot be used."""
    stored = read_learned(path)
    try:
        return LearnedState(stored), None if stored is None else AcceptanceModel.from_bytes(stored).num_learned
    except ValueError:  # as a server does; `check` says what is wrong with it
        return LearnedState(None), None


def _report(
    seen: Seen, facts: dict[str, Any], context: Sequence[int], snapshot: Snapshot, decode: Decode
) -> dict[str, Any]:
    """``facts``, the draft, why it ended, and all that was looked up and judged; texts where they can be decoded."""
    draft, ids = seen.draft, seen.draft.token_ids.tolist()

    def text(name: str, ids: Sequence[int]) -> dict[str, str]:
        return {} if decode is None else {name: decode(ids)}

    def shown_place(place: Place, lookup: Lookup) -> dict[str, Any]:
        before, goes_on = _before(place, lookup, seen, context, snapshot), list(place.goes_on[:_SHOWN_TOKENS])
        return {
            "where": _OWN if place.segment == OWN_TEXT else snapshot.segments[place.segment].segment_id,
            "position": place.position,
            "length": lookup.lengths[place.level],
            "stands_for": place.weight,
            "before": before,
            **text("before_text", before),
            "goes_on": goes_on,
            **text("goes_on_text", goes_on),
        }

    positions = [asdict(position) for position in seen.positions]
    for position in positions:
        position["candidates"] = [
            {"token_id": each["token_id"], **text("text", [each["token_id"]]), **each}
            for each in position["candidates"]
        ]
    return {
        **facts,
        "draft": {
            "token_ids": ids,
            **({} if decode is None else {"texts": [decode([token]) for token in ids]}),
            "parents": draft.parents_of_all(),
            "chances": [] if draft.probabilities is None else draft.probabilities.tolist(),
            "products": draft.chances().tolist() if ids else [],
            "source": draft.source,
            "match_length": draft.match_length,
        },
        "ended": {"reason": seen.ended, "sentence": _why_ended(seen, facts["draft_limit"], facts["price"], decode)},
        "lookups": [
            {
                "after": lookup.after,
                "lengths": lookup.lengths,
                "places": [shown_place(place, lookup) for place in lookup.places],
            }
            for lookup in seen.lookups
        ],
        "positions": positions,
        "unknown": _UNKNOWN,
    }


def _why_ended(seen: Seen, limit: int, price: float, decode: Decode) -> str:
    if seen.ended == "limit":
        return f"the draft limit of {limit} tokens is reached"
    left = seen.best_left_out()
    if left is not None:
        return (
            f"the most probable token left out is {shown([left.token_id], decode)}: it comes, with all before it, in "
            f"{percent(left.product)} of cases, and drafting it costs {price:g} of an accepted token"
        )
    if not seen.lookups[0].lengths:
        return "the last token stands nowhere else, neither in the cache nor earlier in the text"
    return "the texts that agree with the draft end there, and what the draft ends with stands nowhere else"


def _before(place: Place, lookup: Lookup, seen: Seen, context: Sequence[int], snapshot: Snapshot) -> list[int]:
    """The last tokens before a place."""
    first = max(0, place.position - _SHOWN_TOKENS)
    if place.segment == OWN_TEXT:
        drafted = seen.draft.token_ids[path_to(lookup.after, seen.draft)].tolist()
        return [*context, *drafted][first : place.position]
    segment = snapshot.segments[place.segment]
    tokens: list[int] = unpack(segment.text, place.position - first, segment.width, start=first).tolist()
    return tokens[max((i + 1 for i, token in enumerate(tokens) if token < 0), default=0) :]


def _as_text(report: dict[str, Any], context: Sequence[int], decode: Decode) -> Iterator[str]:
    """The report for people: the draft as a tree with its chances, why it ends, and the places it was made of."""
    yield f"{report['path']}: {report['index_tokens']:,} tokens in {report['segments']} segments; " + (
        f"chances as learned from {report['learned_from']:,} candidates"
        if report["learned_from"]
        else "nothing was learned about acceptance yet, chances are by rule of thumb"
    )
    output = f" and {report['output_tokens']:,} of output" if report["output_tokens"] else ""
    ending = shown(context[-_TAIL_TOKENS:], decode)
    yield f"the text: {report['prompt_tokens']:,} tokens of prompt{output}, ending {ending}"
    first = report["lookups"][0]
    for number, length in enumerate(first["lengths"]):
        places = [place for place in first["places"] if place["length"] == length]
        own = sum(place["stands_for"] for place in places if place["where"] == _OWN)
        index = sum(place["stands_for"] for place in places if place["where"] != _OWN)
        if own + index:  # else the places are those of the longer match
            at_least = "at least " if any(place["stands_for"] > 1.0 for place in places) else ""
            tail = shown(context[-min(length, _TAIL_TOKENS) :], decode)
            yield (
                f"  its last {length} tokens {tail} stand elsewhere{' too' if number else ''}: {at_least}{index:.0f} "
                f"in the cache, {own:.0f} in the text itself"
            )
    draft, ended = report["draft"], report["ended"]["sentence"]
    yield ""
    if draft["token_ids"]:
        yield (
            f"draft: a {report['shape']} of {len(draft['token_ids'])} tokens from {draft['source']!r}, of which "
            f"{sum(draft['products']):.1f} are expected to be accepted, at a price of {report['price']:g} each"
        )
    else:
        yield f"no draft: {ended}"
    if report["hint"] is not None:
        yield f"note: {report['hint']}"
    if any(position["candidates"] for position in report["positions"]):
        yield "  chance   with all   votes         token (- left out)"
        yield "           before it"
    yield from _below(report["positions"], CONTEXT_END, 0, decode)
    if draft["token_ids"]:
        yield f"it ends here: {ended}"
    yield from _views(report["positions"][0]["candidates"], decode)
    for lookup in report["lookups"]:
        if lookup["lengths"]:
            yield from _places(lookup, decode)
    yield from ("", report["unknown"])


def _below(positions: Sequence[dict[str, Any]], after: int, indent: int, decode: Decode) -> Iterator[str]:
    """What comes after a node; further in only where it branches."""
    position = positions[after + 1]
    taken = [each for each in position["candidates"] if each["node"] is not None]
    left = [each for each in position["candidates"] if each["node"] is None and each["product"] >= _LEAST_SHOWN]
    is_branch = len(taken) > 1
    for candidate in [*([] if is_branch else taken), *left[:_MOST_LEFT_OUT]]:
        yield _line(candidate, position, indent, decode)
    for candidate in taken:
        if is_branch:
            yield _line(candidate, position, indent, decode)
        yield from _below(positions, candidate["node"], indent + is_branch, decode)


def _line(candidate: dict[str, Any], position: dict[str, Any], indent: int, decode: Decode) -> str:
    votes = sum(candidate["own_votes"]) + sum(candidate["index_votes"])
    said = f"{votes:.0f} of {sum(position['own_support']) + sum(position['index_support']):.0f}"
    mark = "  " * indent + ("- " if candidate["node"] is None else "")
    chances = f"{percent(candidate['chance']):>6}   {percent(candidate['product']):>9}"
    return f"  {chances}   {said:<12}  {mark}{shown([candidate['token_id']], decode)}"


def _views(candidates: Sequence[dict[str, Any]], decode: Decode) -> Iterator[str]:
    if candidates:
        yield ""
        yield "where the chance of the first token comes from: what each view says, and how much it counts"
    for candidate in candidates[:_MOST_VIEWED]:
        views = sorted(candidate["views"], key=lambda view: -abs(view["weight"]))
        said = ", ".join(f"{view['name']} {percent(view['chance'])} ({view['weight']:.2f})" for view in views)
        yield f"  {shown([candidate['token_id']], decode)} {percent(candidate['chance'])}: {said}"


def _places(lookup: dict[str, Any], decode: Decode) -> Iterator[str]:
    count = len(lookup["places"])
    where = "the end of the text" if lookup["after"] == CONTEXT_END else "the draft's end, looked up again,"
    yield ""
    yield f"places where {where} stands as well" + (f", {_MOST_PLACES} of {count}" if count > _MOST_PLACES else "")
    for place in lookup["places"][:_MOST_PLACES]:
        stands_for = f" (stands for {place['stands_for']:.0f})" if place["stands_for"] > 1.5 else ""
        yield (
            f"  {place['length']:3} tokens  {place['where']} at {place['position']:,}{stands_for}: "
            f"{shown(place['before'], decode)} > {shown(place['goes_on'], decode)}"
        )


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
    """A JSON array of ids, or {"token_ids": [...]} as ``ssd-cache export`` writes them. Raises InputError."""
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
