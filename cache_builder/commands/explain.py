"""``ssd-cache explain``: show the draft that a server would make after a text, and the text's matches in the cache."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from cache_builder.commands.options import CACHE_DIRECTORY, add_chat_template, codec_from_options
from cache_builder.inputs.conversations import chat_encoder
from cache_builder.inputs.input_streams import input_errors, open_raw
from cache_builder.inputs.record import InputError
from cache_builder.opened_cache import (
    Decode,
    OpenedCache,
    format_probability,
    format_tokens,
    open_cache,
    read_learned_state,
)
from ssd.bundled import MODEL_PATH
from ssd.config import MAX_SPECULATIVE_TOKENS, DraftConfig
from ssd.drafting.acceptance_model import AcceptanceModel
from ssd.drafting.protocol import Draft, DraftRequest
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.errors import ConfigError
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.ring import iter_blocks
from ssd.retrieval.segment import SEPARATOR, Tokens, unpack
from ssd.retrieval.snapshot import SegmentTable, Snapshot
from ssd.text.codec import TextCodec

_DESCRIPTION = """\
Show what a server drafts after a text: the draft as a tree with the acceptance probability of every token, and the
occurrences of the end of the text in the cache.

FILE contains text. If its name ends in .json, it contains the body of a request, {"messages": [...]} or
{"prompt": "..."}, or an array of token ids. Text is encoded as by /v1/completions, and messages by the chat template,
so the same words have other tokens and other drafts in a text than in messages.
"""
_UNKNOWN: Final = (
    "A server has more information: text that is not in a segment yet, outputs that other requests are generating, its "
    "model's earlier candidates, and the measured cost of a draft token."
)
_SHOWN_TOKENS: Final = 12
_TAIL_TOKENS: Final = 24
_MAX_PLACES: Final = 8
_LARGEST_ID: Final = 2**31 - 2


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.description = _DESCRIPTION
    command.add_argument("directory", type=Path, metavar="DIR", help=CACHE_DIRECTORY)
    command.add_argument("--prompt", metavar="FILE", required=True, help="File with the prompt; - is standard input")
    command.add_argument("--output", metavar="FILE", help="File with the output generated so far")
    command.add_argument(
        "--tokenizer",
        metavar="DIR_OR_MODEL",
        help="Directory, hub id or tokenizer.json of the served model's tokenizer (default: that of the small model "
        "included in SSD; for an array of token ids none, so that token ids are shown)",
    )
    add_chat_template(command)
    command.add_argument(
        "--draft-limit",
        type=int,
        default=DraftConfig().num_speculative_tokens,
        metavar="K",
        help=f"Maximum number of tokens of the draft, 1 to {MAX_SPECULATIVE_TOKENS} (default: %(default)s)",
    )
    command.add_argument(
        "--shape",
        choices=("tree", "chain"),
        default="tree",
        help="Shape of the draft (default: %(default)s). Servers draft trees while one sequence runs, else chains",
    )
    command.add_argument("--json", action="store_true", help="Print one JSON object")


def run(options: argparse.Namespace) -> int:
    if not 1 <= options.draft_limit <= MAX_SPECULATIVE_TOKENS:
        raise ConfigError(f"--draft-limit must be within 1..{MAX_SPECULATIVE_TOKENS}, got {options.draft_limit}")
    prompt, codec = _encode_prompt_file(options.prompt, codec_from_options(options))
    output = []
    if options.output is not None:
        codec = codec or _load_bundled_codec()
        output = codec.encode_completion(_read(options.output))
    context = np.array([*prompt, *output], np.int32)
    if not len(context):
        raise ConfigError("the prompt is empty: give a file that contains text, messages or token ids")
    cache = open_cache(options.directory, codec)
    learned, learned_from = _read_acceptance_model(options.directory)
    snapshot = Snapshot(0, SegmentTable(cache.segments), np.zeros(1, np.int32), 0, 0)
    request = DraftRequest(
        "explained",
        context,
        len(prompt),
        snapshot,
        options.draft_limit,
        allow_tree=options.shape == "tree",
        learned=learned,
    )
    draft = SuffixDrafter(recycling=False).propose([request])[0]
    places = list(_find_occurrences(cache, context, draft.match_length)) if draft.match_length else []
    facts = {
        "report": "explain",
        "path": str(cache.path),
        "segments": len(cache.segments),
        "index_tokens": sum(int((block != SEPARATOR).sum()) for each in cache.segments for block in iter_blocks(each)),
        "learned_from": learned_from,
        "prompt_tokens": len(prompt),
        "output_tokens": len(output),
        "shape": options.shape,
        "draft": {
            "token_ids": draft.token_ids.tolist(),
            "parents": draft.parents_of_all(),
            "chances": [] if draft.probabilities is None else draft.probabilities.tolist(),
            "products": draft.path_probabilities().tolist() if len(draft.token_ids) else [],
            "source": draft.source,
            "match_length": draft.match_length,
        },
        "num_places": len(places),
        "places": places[:_MAX_PLACES],
    }
    decode = None if codec is None else codec.decode
    print(json.dumps(facts, indent=1) if options.json else "\n".join(_lines(facts, draft, context, decode)))
    return 0


def _read_acceptance_model(path: Path) -> tuple[LearnedState, int | None]:
    """Read the acceptance model that a server stored with the cache (learned.bin).

    Also returns the number of candidate tokens that the model was trained on. If the file is missing or damaged, the
    result is an untrained model and None.
    """
    stored = read_learned_state(path)
    try:
        return LearnedState(stored), None if stored is None else AcceptanceModel.from_bytes(stored).num_learned
    except ValueError:  # like a server; `inspect --deep` reports the fault
        return LearnedState(None), None


def _find_occurrences(cache: OpenedCache, context: Tokens, length: int) -> Iterator[dict[str, Any]]:
    """Yield every occurrence of the last ``length`` tokens of the context in the cache. O(tokens of the cache).

    Each occurrence is a JSON object: the segment, the position of the next token, and the tokens around this position.
    """
    tail = context[-length:]
    for segment in cache.segments:
        tokens = unpack(segment.text, len(segment), segment.width)
        ends = np.flatnonzero(tokens == tail[-1])
        for back in range(2, length + 1):
            ends = ends[ends >= back - 1]
            ends = ends[tokens[ends - back + 1] == tail[-back]]
        for position in (ends + 1).tolist():
            before = tokens[max(0, position - _SHOWN_TOKENS) : position]
            after = tokens[position : position + _SHOWN_TOKENS]
            begin = int(np.flatnonzero(before == SEPARATOR).max(initial=-1)) + 1
            end = int(np.flatnonzero(after == SEPARATOR).min(initial=len(after)))
            around = {"before": before[begin:].tolist(), "goes_on": after[:end].tolist()}
            yield {"segment": segment.segment_id, "position": position, **around}


def _lines(facts: dict[str, Any], draft: Draft, context: Tokens, decode: Decode) -> Iterator[str]:
    yield f"{facts['path']}: {facts['index_tokens']:,} tokens in {facts['segments']} segments; " + (
        f"acceptance probabilities estimated from {facts['learned_from']:,} candidates"
        if facts["learned_from"]
        else "no acceptance statistics yet, so acceptance probabilities are defaults"
    )
    output = f" and {facts['output_tokens']:,} output tokens" if facts["output_tokens"] else ""
    end = _format_end(context, _TAIL_TOKENS, decode)
    yield f"context: {facts['prompt_tokens']:,} prompt tokens{output}, ending in {end}"
    yield ""
    if len(draft.token_ids):
        yield (
            f"draft: a {facts['shape']} of {len(draft.token_ids)} tokens from source {draft.source!r}; expected "
            f"accepted tokens: {sum(facts['draft']['products']):.1f}"
        )
        yield "   acceptance    cumulative   token"
        yield "  probability   probability"
        yield from _format_descendants(-1, 0, facts["draft"], decode)
    else:
        yield "no draft: the last token occurs nowhere else, or the tokens after it are rarely accepted"
    if draft.match_length:
        count = facts["num_places"]
        end = _format_end(context, min(draft.match_length, _TAIL_TOKENS), decode)
        yield ""
        yield (
            f"the last {draft.match_length} tokens {end} occur {count:,} times in the cache"
            + (f"; these are the first {_MAX_PLACES}" if count > _MAX_PLACES else "")
        )
    for place in facts["places"]:
        yield (
            f"  {place['segment']} at {place['position']:,}: {format_tokens(place['before'], decode)} > "
            f"{format_tokens(place['goes_on'], decode)}"
        )
    yield from ("", _UNKNOWN)


def _format_end(context: Tokens, count: int, decode: Decode) -> str:
    return format_tokens(context[-count:].tolist(), decode)


def _format_descendants(after: int, indent: int, draft: dict[str, Any], decode: Decode) -> Iterator[str]:
    """Yield one line of text for each token of a draft tree below the token ``after``, with its acceptance probability.

    Tokens with alternatives, and all tokens below them, are indented by one more level.
    """
    children = [node for node, parent in enumerate(draft["parents"]) if parent == after]
    for node in children:
        chances = (
            f"{format_probability(draft['chances'][node]):>11}   {format_probability(draft['products'][node]):>11}"
        )
        yield f"  {chances}   {'  ' * indent}{format_tokens([draft['token_ids'][node]], decode)}"
        yield from _format_descendants(node, indent + (len(children) > 1), draft, decode)


def _encode_prompt_file(name: str, codec: TextCodec | None) -> tuple[list[int], TextCodec | None]:
    """Tokenize a prompt or conversation in a file as the server does, and return the token ids and the tokenizer.

    Raises InputError if the file cannot be read or parsed, and RequestError if the chat template rejects the
    conversation.
    """
    text = _read(name)
    if not name.endswith(".json"):
        codec = codec or _load_bundled_codec()
        return codec.encode_prompt(text), codec
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not valid JSON ({error}): correct the file") from None
    if isinstance(body, list) and all(type(each) is int and 0 <= each <= _LARGEST_ID for each in body):
        return body, codec
    codec = codec or _load_bundled_codec()
    if isinstance(body, list):
        body = {"messages": body}
    if isinstance(body, dict) and isinstance(body.get("messages"), list):
        kwargs = body.get("chat_template_kwargs") or {}
        if isinstance(kwargs, dict):
            kwargs = {**kwargs, **{name: body[name] for name in ("tools", "documents") if body.get(name)}}
            return chat_encoder(codec, kwargs)(body["messages"]), codec
    if isinstance(body, dict) and isinstance(body.get("prompt"), str):
        return codec.encode_prompt(body["prompt"]), codec
    raise InputError(
        f'{name} must contain {{"messages": [...]}}, {{"prompt": "..."}} or an array of token ids from 0 to '
        f"{_LARGEST_ID}. Store plain text in a file named *.txt"
    )


def _load_bundled_codec() -> TextCodec:
    return TextCodec.load(str(MODEL_PATH))


def _read(name: str) -> str:
    with input_errors(name), open_raw(name) as file:
        return file.read().decode("utf-8-sig")
