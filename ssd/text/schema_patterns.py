"""String formats and regular expressions of JSON schemas, and llguidance's complaints about them in plain words."""

from __future__ import annotations

import importlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ssd.errors import quote_value

_MAX_NAMES = 64  # property names that may replace a pattern

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_N = "[0-9]{1,4}"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_SECONDS = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"

FORMATS: Final[Mapping[str, str | None]] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": f"^P(?:{_DAYS}(?:{_SECONDS})?|{_SECONDS}|{_N}W)$",
    **dict.fromkeys(("email", "hostname", "ipv4", "ipv6", "uri", "uuid")),
}
"""The JSON schema string formats that are enforced, each with the regular expression that is used as its pattern.

None means that llguidance implements the format. All other formats are ignored.
"""


def error_reason(complaint: str) -> str:
    """Return the reason in an llguidance error message as one line of plain words."""
    if re.search("look-?around", complaint):
        return "look-around is not supported"
    if complaint.startswith("NoExtension"):
        return "it is a dead end: no text satisfies it"
    if complaint.startswith("Resource"):
        return "only references within the schema are supported"
    if "coerce_one_of" in complaint:
        return (
            "more than one branch may be valid for one value: make them exclude each other, for instance by a const, "
            "or use anyOf"
        )
    lines = complaint.strip().splitlines() or ["unknown"]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    if "Regex is empty" in reason:
        reason = "Unsatisfiable schema: its patterns, format and length exclude each other"
    reason = re.sub(r": json-schema:\S*|^at .*failed to compile JSON schema: ", "", reason)
    return reason.replace("Unsatisfiable schema:", "no value satisfies it:")


PROBES: Final = ("", "a", "A", "0", " ", "-", "\n", "\r", "\u2028", "\x00", "\u00e9", "aa")
"""Names that show whether some patterns together match every name."""


def for_python(pattern: str) -> str:
    return pattern.replace("(?<", "(?P<")


def pattern_complaint(pattern: str) -> str:
    """Return the reason why llguidance cannot use a regular expression; an empty string if it can."""
    try:
        from llguidance import LLMatcher
    except ImportError:  # then no grammar is made
        return ""
    found = LLMatcher.validate_grammar(
        LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    )
    if not found or found.startswith("Unsatisfiable"):  # this depends on the rest of the schema
        return ""
    return f"cannot be used: {quote_pattern(pattern)}: {error_reason(found)}"


def quote_pattern(pattern: str) -> str:
    """Return a regular expression in quotes for an error message, without doubled backslashes."""
    return f"'{pattern}'" if pattern.isprintable() and len(pattern) <= 120 else quote_value(pattern)


def names_matched_by(pattern: str) -> list[str] | None:
    """Return all strings that a regular expression matches; None if there are many or they are hard to list."""
    try:
        items = list(importlib.import_module("re._parser").parse(pattern))
    except (re.error, OverflowError, RecursionError, ImportError):
        return None
    if [str(argument) for _, argument in items[:1] + items[-1:]] != ["AT_BEGINNING", "AT_END"]:
        return None
    found = _expand(items[1:-1])
    return None if found is None else sorted(set(found))


def _expand(items: Iterable[Any]) -> list[str] | None:
    found = [""]
    for kind, argument in items:
        if str(kind) == "LITERAL":
            parts: list[str] | None = [chr(argument)]
        elif str(kind) == "IN":
            parts = []
            for inner, value in argument:
                low, high = value if str(inner) == "RANGE" else (value, value)
                if str(inner) not in ("LITERAL", "RANGE") or high - low >= _MAX_NAMES:
                    return None
                parts += map(chr, range(low, high + 1))
        elif str(kind) == "BRANCH":
            branches = [_expand(branch) for branch in argument[1]]
            parts = None if None in branches else [text for branch in branches if branch for text in branch]
        elif str(kind) == "SUBPATTERN" and not argument[1] and not argument[2]:
            parts = _expand(argument[3])
        elif str(kind) == "MAX_REPEAT" and argument[1] <= 4:
            if (once := _expand(argument[2])) is None:
                return None
            parts = []
            for times in range(argument[0], argument[1] + 1):
                repeated = itertools.product(once, repeat=times)
                parts += map("".join, itertools.islice(repeated, _MAX_NAMES + 1))
        else:
            return None
        if parts is None or len(found) * len(parts) > _MAX_NAMES:
            return None
        found = [text + part for text in found for part in parts]
    return found
