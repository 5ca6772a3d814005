"""Compilation of structured-output constraints to grammars, with limits on their size and a shared memory budget.

llguidance does not report the memory of a grammar. It is estimated as the growth of the C library's allocations during
the compilation. Allocations of other threads count too, so the estimate is clamped to a range proportional to the
compilation's processor time: in ten tests with sources of all kinds, memory grew by 5 to 330 MB per second.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote

from ssd.config import StructuredOutput
from ssd.errors import RequestError, first_line
from ssd.text.codec import TextCodec
from ssd.text.exact_numbers import ExactRules, has_inexact_constants
from ssd.text.grammar import GrammarState, MaskThreads
from ssd.text.grammar_memory import (
    MAX_GRAMMAR_BYTES,
    Compiled,
    GrammarCost,
    GrammarMemory,
    GrammarReservation,
    allocated_bytes,
    trim_soon,
)
from ssd.text.schema import prepare_schema
from ssd.text.schema_patterns import error_reason, quote_pattern
from ssd.text.schema_tree import children, resolve, subschema_at

INSTALL = "pip install 'ssd-serving[structured]'"

# The number of accepted sources that are remembered, with about 200 bytes each.
_MAX_TRIED = 1 << 14
# The minimum bytes of a grammar, and the minimum and maximum per second of its compilation, see the module docstring.
_LEAST_BYTES, _LEAST_RATE, _MAX_RATE = 16 << 10, 2 << 20, 512 << 20
# Sources beyond these limits are refused: half a second and 50 MB for the worst short source.
_LEXER_FUEL, _LEXER_STATES = 250_000, 1 << 16
# The maximum number of parser states at one position of the output, by kind of constraint. With 2,000 states, the
# ambiguous grammar x: x x | "a" took 170 ms per token after 800 tokens, and all requests waited for it. For the other
# kinds our own grammars have few states, or one for each of many choices.
_PARSER_STATES = {"grammar": 256}
_MAX_PARSER_STATES = 2000


_LARGE_COST = 1 << 12  # above it, a source may take megabytes


def expected_cost(output: StructuredOutput) -> int:
    """Estimate the time to compile a constraint, in units of about 10 us, without compiling it.

    The estimate is the number of characters, multiplied by the repetitions in regular expressions. The actual time is
    seldom far longer.
    """
    cost = len(output.source)
    if output.kind != "json_schema":
        for repeats in _REPEATS.findall(output.source)[:_MAX_LOOKED_AT]:
            cost = min(cost * max(1, int(repeats[-6:])), 1 << 30)
    return cost


_REPEATS = re.compile(r"\{(?:[0-9]*,)?([0-9]+)\}")
_MAX_LOOKED_AT = 64


class GrammarCompiler:
    """Compiles the structured-output constraints of requests, and caches the latest compiled grammars. Thread-safe."""

    def __init__(
        self, codec: TextCodec, *, vocab_size: int, eos_token_ids: Sequence[int], max_bytes: int = MAX_GRAMMAR_BYTES
    ) -> None:
        """Create a compiler for a tokenizer and a model with ``vocab_size`` logits.

        All compiled grammars together use at most ``max_bytes``, see `GrammarMemory`.
        """
        self._codec = codec
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._token_names: dict[str, str] = {}
        self.memory = GrammarMemory(max_bytes)
        self._threads = MaskThreads()
        # Of the grammars that compiled, by digest, the latest last.
        self._tried: OrderedDict[bytes, GrammarCost] = OrderedDict()

    def knows(self, output: StructuredOutput, tenant: str | None) -> bool:
        """Return whether `compile` has accepted this constraint of this tenant before; compiling it again is fast."""
        with self._lock:
            return _digest(output, tenant) in self._tried

    def compile(self, output: StructuredOutput, tenant: str | None = None) -> GrammarState:
        """Validate a constraint, and return the object that computes the token masks of a request with this constraint.

        The first call for a constraint takes milliseconds to a second. The compiled grammar is fetched from the cache,
        or compiled again, when the first mask is needed.

        Args:
            output: The constraint.
            tenant: The tenant. Each tenant compiles its own grammars, so that timing does not reveal other tenants'
                grammars.

        Raises:
            RequestError: The source is invalid, cannot be used with this tokenizer, or llguidance is not installed.
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

        def open_it(may_refuse: bool) -> GrammarReservation | None:
            kept = self.memory.find(tenant, output)
            return self.memory.open(found, kept, lambda: self._compile(output, tenant), may_refuse=may_refuse)

        return GrammarState(open_it, self._eos_token_ids, self._vocab_size, output.param, self._threads, tenant)

    def _compile(self, output: StructuredOutput, tenant: str | None) -> Compiled:
        kept = self.memory.find(tenant, output)
        if kept is None:  # without a lock, so that no request waits for another one's grammar
            before = allocated_bytes()
            try:
                start, seconds = self._matcher(output)
            finally:
                if expected_cost(output) > _LARGE_COST:
                    trim_soon()  # compiling takes more memory than it leaves
            grown = allocated_bytes() - before
            least = _LEAST_BYTES + 4 * len(output.source) + int(_LEAST_RATE * seconds)
            kept = Compiled(start, GrammarCost(max(least, min(grown, int(_MAX_RATE * seconds))), seconds))
            self.memory.store(tenant, output, kept)
        return kept

    def _matcher(self, output: StructuredOutput) -> tuple[Any, float]:
        """Return an llguidance matcher in its initial state, and the processor seconds of the compilation."""
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise RequestError(
                f"{output.param} needs llguidance, which is not installed: {INSTALL}, or omit the field",
                param=output.param,
            ) from None
        if not self._eos_token_ids:
            raise RequestError(
                f"{output.param} needs an end-of-text token, but this model's tokenizer has none: omit {output.param}",
                param=output.param,
            )
        try:
            if self._tokenizer is None:
                tokenizer_json, self._token_names = _rename_special_tokens(self._codec.to_json())
                self._tokenizer = LLTokenizer(
                    tokenizer_json, n_vocab=self._vocab_size, eos_token=list(self._eos_token_ids)
                )
            matcher, seconds = on_deep_stack(lambda: _new_matcher(self._tokenizer, output, self._token_names))
            complaint = ""
        except ValueError as error:
            complaint = str(error)
        except BaseException as error:  # a panic in Rust is no Exception
            if type(error).__name__ != "PanicException":
                raise
            complaint = f"llguidance failed: {error}"
        if complaint:
            reason = first_line(ValueError(complaint))
            raise RequestError(f"{output.param} cannot be used: {reason:.500}", param=output.param)
        return matcher, seconds


def _rename_special_tokens(tokenizer_json: str) -> tuple[str, dict[str, str]]:
    """Rename the special tokens in a ``tokenizer.json`` to random names; return the new file and the new names.

    llguidance encodes text that must come next according to the grammar with this tokenizer. With the original names,
    text in a grammar that spells a special token, e.g. <|endoftext|>, would become that control token.
    """
    tokenizer = json.loads(tokenizer_json)
    secret = secrets.token_hex(16)
    special = [token for token in tokenizer.get("added_tokens", []) if token["special"]]
    names = {token["content"]: f"<{secret}-{number}>" for number, token in enumerate(special)}
    for token in special:
        token["content"] = names[token["content"]]
    model = tokenizer["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    tokenizer["post_processor"] = None  # it names tokens, and nothing is added to forced bytes
    return json.dumps(tokenizer), names


def _digest(output: StructuredOutput, tenant: str | None) -> bytes:
    return hashlib.sha256(repr((tenant, output.kind, output.source)).encode()).digest()


def _new_matcher(tokenizer: Any, output: StructuredOutput, token_names: Mapping[str, str]) -> tuple[Any, float]:
    from llguidance import LLMatcher, LLParserLimits

    began = time.thread_time()

    limits = LLParserLimits(
        initial_lexer_fuel=_LEXER_FUEL,
        max_lexer_states=_LEXER_STATES,
        max_items_in_row=_PARSER_STATES.get(output.kind, _MAX_PARSER_STATES),
        verbose_errors=False,
    )
    grammars = _grammars_of(output, token_names)
    matcher = LLMatcher(tokenizer, json.dumps({"grammars": grammars}), log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # llguidance compiles much only now, and may find it too complex
    if matcher.is_error():
        raise ValueError(_locate_error(output, grammars, matcher.get_error()))
    return matcher, time.thread_time() - began


def _grammars_of(output: StructuredOutput, token_names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Translate a constraint to llguidance's list of grammars, the main one first; ValueError if it is malformed."""
    from llguidance import LLMatcher

    if output.kind == "parts":
        composed = json.loads(output.source)
        entries = [{"lark_grammar": _prepared_lark(composed["lark"], token_names)}]
        for name, part in composed["parts"].items():
            (entry,) = _grammars_of(StructuredOutput(*part), token_names)
            entries.append({**entry, "name": name})
        return entries
    if output.kind == "json_object":
        return [_json_entry({"type": "object"})]
    if output.kind == "json_schema":
        try:
            return [_json_entry(prepare_schema(json.loads(output.source)))]
        except RecursionError:
            raise ValueError("the schema is nested too deeply: use fewer levels") from None
    if output.kind == "regex":
        (entry,) = json.loads(LLMatcher.grammar_from_regex(output.source))["grammars"]
        return [entry]
    if output.kind == "choice":
        choices = json.loads(output.source)
        if not choices or not all(isinstance(choice, str) and choice for choice in choices):
            raise ValueError("give at least one choice, each a text that is not empty")
        return [{"lark_grammar": "start: " + " | ".join(json.dumps(choice) for choice in choices)}]
    return [{"lark_grammar": _prepared_lark(output.source, token_names)}]


# At most one space after a comma or a colon, as in `json.dumps` and most training data. With arbitrary white space,
# small models wrote a 15-token object in 51 to 137 tokens.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": r",\x20?", "key_separator": r":\x20?"}

_CONTROL_CHARACTERS = re.compile(r"\\u00[01]|\\\\[cux]")


def json_options(schema: Any) -> dict[str, Any]:
    r"""Return llguidance's options for generating JSON under a schema.

    The options disable escapes like \u0041, because a model could spell a key twice with them. The escapes are
    enabled only if the schema requires control characters, which cannot be written without them.
    """
    escapes = 'nrbtf\\"' + ("u" if _CONTROL_CHARACTERS.search(json.dumps(schema, ensure_ascii=False)) else "")
    return {**JSON_OPTIONS, "json_allowed_escapes": escapes}


def _json_entry(schema: dict[str, Any]) -> dict[str, Any]:
    options = json_options(schema)
    if has_inexact_constants(schema, schema):
        rules = ExactRules(schema, "value_", options).rules
        return {"lark_grammar": "start: value_0\n" + "\n".join(f"{name}: {body}" for name, body in rules.items())}
    return {"json_schema": {**schema, "x-guidance": options}}


# Matches the JSON schemas and token names in a Lark grammar, and strings, comments and patterns to skip them.
_LARK = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|%json\s*(?=[{\[])|<[^<>\s]*>')


def _prepared_lark(source: str, token_names: Mapping[str, str]) -> str:
    """Prepare a Lark grammar for llguidance: rewrite its JSON schemas by `prepare_schema`, and rename special tokens.

    ``token_names`` are the new names of the special tokens. Raises ValueError for a schema that cannot be enforced.
    Invalid JSON is left unchanged, so that llguidance reports it.
    """
    made: list[str] = []
    more: dict[str, str] = {}
    at = 0
    while (found := _LARK.search(source, at)) is not None:
        text = found[0]
        made.append(source[at : found.start()])
        at = found.end()
        if text.startswith("%json"):
            try:
                schema, at = json.JSONDecoder().raw_decode(source, at)
            except (ValueError, RecursionError):
                made.append(text)
                continue
            schema = prepare_schema(schema)
            guidance = schema.pop("x-guidance", {})
            options = {**json_options(schema), **guidance}
            if has_inexact_constants(schema, schema):
                prefix = f"exact{secrets.token_hex(8)}_"  # a name that no rule has
                more |= ExactRules(schema, prefix, options).rules
                text = f"{prefix}0 "
            else:
                guidance = {"json_allowed_escapes": options["json_allowed_escapes"], **guidance}
                text = f"%json {json.dumps({**schema, 'x-guidance': guidance})}"
        made.append(token_names.get(text, text))
    return "".join([*made, source[at:], *(f"\n{name}: {body}" for name, body in more.items())])


# -- the location of an error in a schema

_MAX_LOOKED_THROUGH = 1 << 22  # characters of schemas compiled to find the faulty one


def _locate_error(output: StructuredOutput, grammars: Sequence[Mapping[str, Any]], complaint: str) -> str:
    """Return the reason of an llguidance error. If a JSON schema causes it, name the keyword and its JSON pointer."""
    from llguidance import LLMatcher

    if output.kind == "regex":
        return f"{quote_pattern(output.source)}: {error_reason(complaint)}"

    left = _MAX_LOOKED_THROUGH

    def complaint_at(schema: dict[str, Any], at: str) -> str:
        nonlocal left
        text = json.dumps({"grammars": [{"json_schema": subschema_at(schema, at)}]})
        left -= len(text)
        return LLMatcher.validate_grammar(text) if left > 0 else ""

    for schema in _schemas_in(grammars):
        if found := complaint_at(schema, ""):
            node, at = schema, ""
            visited: set[str] = set()
            while at not in visited:
                visited.add(at)
                target = resolve(schema, node.get("$ref")) if isinstance(node, dict) else None
                parts = [(target, unquote(node["$ref"][1:]))] if target is not None else [*children(node, at)]
                for part, pointer in parts:
                    if isinstance(part, dict) and not _DEFINITION.search(pointer[len(at) :]):
                        inner = complaint_at(schema, pointer)
                        if inner:
                            node, at, found = part, pointer, inner
                            break
            keys = sorted(node, key=lambda key: key not in _COMPLAINTS)
            keyword = next((key for key in keys if _is_about(found, key)), None)
            place = f"{keyword} at {at}/{keyword}" if keyword else f"the schema at {at or '/'}"
            whose = f"{schema['$comment']}: " if isinstance(schema.get("$comment"), str) else ""
            return f"{whose}{place}: {error_reason(found)}"
    return error_reason(complaint)


_DEFINITION = re.compile("^/(?:[$]defs|definitions)/")
# Patterns of the llguidance errors that some JSON schema keywords cause without being named in the error.
_COMPLAINTS = {
    "$ref": "Pointer|Resource|circular",
    "oneOf": "oneOf",
    **dict.fromkeys(("pattern", "format"), "Regex is empty"),
    "patternProperties": "patternProperty",
    "minProperties": "min/max|minProperties",
    "maxProperties": "min/max|maxProperties",
}


def _is_about(complaint: str, key: str) -> bool:
    if key == "properties":  # other errors mention this word
        return False
    return re.search(_COMPLAINTS.get(key, rf"\b{re.escape(key)}\b"), complaint.partition("\n")[0]) is not None


def _schemas_in(grammars: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for entry in grammars:
        if entry.get("json_schema"):
            yield entry["json_schema"]
        for found in _LARK.finditer(entry.get("lark_grammar") or ""):
            if found[0].startswith("%json"):
                try:
                    yield json.JSONDecoder().raw_decode(entry["lark_grammar"], found.end())[0]
                except (ValueError, RecursionError):
                    continue


T = TypeVar("T")

_STACK_BYTES = 512 << 20  # address space; unused parts take no memory
_one_at_a_time = threading.Lock()


def on_deep_stack(call: Callable[[], T]) -> T:
    """Call a function on a thread with a stack of 512 MB, because it recurses deeply. The thread costs 0.1 ms."""
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:  # a panic in Rust is no Exception
            raised.append(error)

    thread = threading.Thread(target=run, name="deep stack")
    with _one_at_a_time:  # the stack size of new threads is a setting of the process
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if raised:
        raise raised[0]
    return returned[0]
