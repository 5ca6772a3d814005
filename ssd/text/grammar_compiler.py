"""Compiles grammars that requests ask for: what takes out of all proportion is refused, all share a budget of bytes.

llguidance does not say what a grammar takes. It is weighed by what the C library's allocator has given out while it was
compiled. That counts what other threads allocate and free meanwhile, so it is held between two rates of the processor
time that compiling took: ten sources of all kinds grew by 5 to 151 MB a second.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, TypeVar

from ssd.config import StructuredOutput
from ssd.errors import RequestError, first_line, shown
from ssd.text.codec import TextCodec
from ssd.text.grammar import GrammarState, MaskThreads
from ssd.text.grammar_memory import MOST_GRAMMAR_BYTES, Compiled, GrammarMemory, Opened, Weight, allocated_bytes

INSTALL = "pip install 'ssd-serving[structured]'"

# That a source compiles is remembered in some 200 bytes.
_MAX_TRIED = 1 << 14
# Bytes of any grammar, and a second of compiling, least and most: see above.
_LEAST_BYTES, _LEAST_RATE, _MOST_RATE = 16 << 10, 2 << 20, 256 << 20
# Half a second and 50 MB for the worst of short sources: what is out of all proportion is refused.
_LEXER_FUEL, _LEXER_STATES = 250_000, 1 << 16
# States of the parser at one place of the output. A place costs about as many times those before it: an ambiguous
# grammar, x: x x | "a", took 170 ms a token after 800 tokens where 2,000 were allowed, and everybody waited for it.
# The other kinds are made by us and have few, or one for each of many choices.
_PARSER_STATES = {"grammar": 256}
_MOST_PARSER_STATES = 2000
# What llguidance has no limit for: it compares the branches of a list with each other (1,500 took 17 to 50 s), and
# counts up to the digits of a multiple (999983 took 22 s and 350 MB).
_MOST_PAIRS = 1 << 16
_MOST_MULTIPLE = 10_000


def expected_cost(output: StructuredOutput) -> int:
    """About how long it takes to compile, in characters of usual sources, some 10 us each.

    Only from the source's length and from how often a regular expression repeats: a few take far more.
    """
    cost = len(output.source)
    if output.kind != "json_schema":
        for repeats in _REPEATS.findall(output.source)[:_MOST_LOOKED_AT]:
            cost = min(cost * max(1, int(repeats[-6:])), 1 << 30)
    return cost


_REPEATS = re.compile(r"\{(?:[0-9]*,)?([0-9]+)\}")
_MOST_LOOKED_AT = 64


class GrammarCompiler:
    """Compiles what requests ask for, and keeps the latest. Safe to use from several threads."""

    def __init__(
        self, codec: TextCodec, *, vocab_size: int, eos_token_ids: Sequence[int], max_bytes: int = MOST_GRAMMAR_BYTES
    ) -> None:
        """``vocab_size`` : of the model's logits, at least the tokenizer's. ``eos_token_ids`` : end a text.

        ``max_bytes`` : of all compiled grammars, as they are weighed; see `GrammarMemory`.
        """
        self._codec = codec
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self.memory = GrammarMemory(max_bytes)
        self._threads = MaskThreads()
        self._tried: OrderedDict[bytes, Weight] = OrderedDict()
        """What compiled, by digest, the latest last."""

    def knows(self, output: StructuredOutput, tenant: str | None) -> bool:
        """Whether `compile` has nothing to try."""
        with self._lock:
            return _digest(output, tenant) in self._tried

    def compile(self, output: StructuredOutput, tenant: str | None = None) -> GrammarState:
        """The grammar's beginning; a few milliseconds to a second the first time that a tenant asks for it.

        It holds no more than the source until it is asked for masks: what was compiled is then taken from those that
        are kept, or compiled again.
        ``tenant`` : for whom; how long it takes is to tell nobody what another has asked for.
        Raises RequestError where it is wrong, cannot be used with this tokenizer, or llguidance is not installed.
        """
        digest = _digest(output, tenant)
        with self._lock:
            weight = self._tried.get(digest)
        if weight is None:
            weight = self._compile(output, tenant).weight
        with self._lock:
            self._tried[digest] = weight
            self._tried.move_to_end(digest)
            if len(self._tried) > _MAX_TRIED:
                self._tried.popitem(last=False)
        found = weight

        def open_it(may_refuse: bool) -> Opened | None:
            kept = self.memory.find(tenant, output)
            return self.memory.open(found, kept, lambda: self._compile(output, tenant), may_refuse=may_refuse)

        return GrammarState(open_it, self._eos_token_ids, self._vocab_size, output.param, self._threads, tenant)

    def _compile(self, output: StructuredOutput, tenant: str | None) -> Compiled:
        kept = self.memory.find(tenant, output)
        if kept is None:  # outside any lock, so that nobody waits for another's grammar
            before = allocated_bytes()
            start, seconds = self._matcher(output)
            grown = allocated_bytes() - before
            least = _LEAST_BYTES + 4 * len(output.source) + int(_LEAST_RATE * seconds)
            kept = Compiled(start, Weight(max(least, min(grown, int(_MOST_RATE * seconds))), seconds))
            self.memory.keep(tenant, output, kept)
        return kept

    def _matcher(self, output: StructuredOutput) -> tuple[Any, float]:
        """At the beginning, and the seconds of a processor that it took."""
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise RequestError(
                f"{output.param} needs llguidance, which is not installed here: {INSTALL}, or leave the field out",
                param=output.param,
            ) from None
        if not self._eos_token_ids:
            raise RequestError(
                f"{output.param} needs a tokenizer with an end-of-text token, and this model's has none",
                param=output.param,
            )
        try:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(
                    self._codec.to_json(), n_vocab=self._vocab_size, eos_token=list(self._eos_token_ids)
                )
            matcher, seconds = on_deep_stack(lambda: _new_matcher(self._tokenizer, output))
            complaint = matcher.get_error() if matcher.is_error() else ""
        except ValueError as error:
            complaint = str(error)
        except BaseException as error:  # a panic in Rust is no Exception
            if type(error).__name__ != "PanicException":
                raise
            complaint = f"llguidance failed: {error}"
        if complaint:
            reason = first_line(ValueError(complaint))
            raise RequestError(f"{output.param} cannot be used: {reason:.300}", param=output.param)
        return matcher, seconds


def _digest(output: StructuredOutput, tenant: str | None) -> bytes:
    return hashlib.sha256(repr((tenant, output.kind, output.source)).encode()).digest()


def _new_matcher(tokenizer: Any, output: StructuredOutput) -> tuple[Any, float]:
    """A matcher at the beginning, which may be in an error state; raises ValueError where the source is malformed."""
    from llguidance import LLMatcher, LLParserLimits

    began = time.thread_time()

    limits = LLParserLimits(
        initial_lexer_fuel=_LEXER_FUEL,
        max_lexer_states=_LEXER_STATES,
        max_items_in_row=_PARSER_STATES.get(output.kind, _MOST_PARSER_STATES),
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, _grammar_of(output, LLMatcher), log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # much is compiled only now, and may be too complex
    return matcher, time.thread_time() - began


def _grammar_of(output: StructuredOutput, matcher: Any) -> str:
    """In llguidance's own form; raises ValueError where the source is malformed."""
    grammar: str
    if output.kind == "json_object":
        grammar = matcher.grammar_from_json_schema('{"type": "object"}', overrides=JSON_OPTIONS)
    elif output.kind == "json_schema":
        _require_moderate(output.source)
        grammar = matcher.grammar_from_json_schema(_closed_source(output.source), overrides=JSON_OPTIONS)
    elif output.kind == "regex":
        grammar = matcher.grammar_from_regex(output.source)
    elif output.kind == "choice":
        choices = json.loads(output.source)
        if not choices or not all(isinstance(choice, str) and choice for choice in choices):
            raise ValueError("give at least one choice, each a text that is not empty")
        grammar = matcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))
    elif output.kind == "parts":
        composed = json.loads(output.source)
        named = {name: StructuredOutput(*part) for name, part in composed["parts"].items()}
        entries = [{**_entry(part, matcher), "name": name} for name, part in named.items()]
        grammar = json.dumps({"grammars": [{"lark_grammar": composed["lark"]}, *entries]})
    else:
        for embedded in _JSON_IN_LARK.finditer(output.source):
            _require_moderate(output.source[embedded.end() :])
        grammar = matcher.grammar_from_lark(output.source)
    return grammar


_JSON_IN_LARK = re.compile(r"%json\s*(?=[{\[])")


def _require_moderate(text: str) -> None:
    """Raise ValueError for a JSON schema, at the beginning of ``text``, that takes long to compile for its length.

    What is no JSON is left to the compiler. O(characters).
    """
    try:
        left = [json.JSONDecoder().raw_decode(text.lstrip())[0]]
    except (ValueError, RecursionError):
        return
    num_pairs = 0
    while left:
        node = left.pop()
        if isinstance(node, dict):
            for key, value in node.items():
                if key in ("anyOf", "oneOf") and isinstance(value, list):
                    num_pairs += len(value) ** 2
                elif key == "multipleOf" and type(value) in (int, float) and _digits(value) > _MOST_MULTIPLE:
                    raise ValueError(f"multipleOf {shown(value)} has too many digits to be counted up to: leave it out")
            left.extend(node.values())
        elif isinstance(node, list):
            left.extend(node)
    if num_pairs > _MOST_PAIRS:
        raise ValueError("it has too many branches in anyOf or oneOf: at most 256 in one list, fewer in several")


def _digits(number: int | float) -> int:
    """Those that are not zeros at an end, as one number: 12 of 1200 and of 0.012; 0 of what is no number."""
    return int("".join(map(str, Decimal(repr(number)).normalize().as_tuple().digits)) or 0)


def _entry(output: StructuredOutput, matcher: Any) -> dict[str, Any]:
    """A grammar as an entry of llguidance's lists of them."""
    written = _grammar_of(output, matcher)
    if output.kind in ("choice", "grammar"):
        return {"lark_grammar": written}
    entry: dict[str, Any] = json.loads(written)["grammars"][0]
    return entry


# -- what JSON that a grammar holds a model to looks like: on one line, without keys that nobody asked for

# At most one space behind a comma or a colon, as `json.dumps` and most training data have it: where white space was
# free, small models wrote a 15-token object in 51 to 137 tokens.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": r",\x20?", "key_separator": r":\x20?"}

_ONE = ("additionalProperties", "contains", "items", "propertyNames", "unevaluatedItems")
_LISTS = ("anyOf", "items", "prefixItems")
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
# A schema with these says of one object in several places: none of them knows all of its keys.
_SEVERAL = frozenset({
    "allOf", "dependencies", "dependentSchemas", "else", "if", "not", "oneOf", "then", "unevaluatedProperties",
})  # fmt: skip
_BESIDE = ("$ref", "$dynamicRef", "anyOf", "patternProperties")


def closed(schema: Any) -> Any:
    """The schema without keys beyond those it names, where it does not say whether there may be others.

    JSON made by it is JSON of the schema as it was, in which a weak model wrote keys of its own, one of them five
    times. Objects that name no keys stay open, and so does a whole schema whose parts speak of one object together, or
    that is nested beyond Python's own bound: what was given is returned. O(schema).
    """
    try:
        return _closed(schema)
    except (_SeveralError, RecursionError):
        return schema


class _SeveralError(Exception):
    pass


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    properties = schema.get("properties")
    if not _SEVERAL.isdisjoint(schema) or (properties and any(key in schema for key in _BESIDE)):
        raise _SeveralError
    made = dict(schema)
    for key in _ONE:
        if isinstance(schema.get(key), dict):
            made[key] = _closed(schema[key])
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            made[key] = [_closed(each) for each in schema[key]]
    for key in _NAMED:
        if isinstance(schema.get(key), dict):
            made[key] = {name: _closed(each) for name, each in schema[key].items()}
    required = schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or "minProperties" in schema:
        return made
    if properties and {*map(str, required)} <= properties.keys():
        made.setdefault("additionalProperties", False)
    return made


def _closed_source(source: str) -> str:
    """See `closed`; what is no JSON, or too deep for us, is left to the compiler."""
    try:
        return json.dumps(closed(json.loads(source)))
    except (ValueError, RecursionError):
        return source


T = TypeVar("T")

_STACK_BYTES = 512 << 20
"""Addresses and not memory: what is not reached is never backed."""
_one_at_a_time = threading.Lock()


def on_deep_stack(call: Callable[[], T]) -> T:
    """What ``call`` returns or raises, on a thread of its own with a stack of 512 MB; takes 0.1 ms more."""
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:  # a panic in Rust is no Exception
            raised.append(error)

    thread = threading.Thread(target=run, name="deep stack")
    with _one_at_a_time:  # the size is a setting of the process, for threads that start
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if raised:
        raise raised[0]
    return returned[0]
