"""The attacks: what is sent, and how the server may answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

BASE: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
MESSAGES = [{"role": "user", "content": "x"}]


@dataclass(frozen=True, slots=True)
class Attack:
    """``body`` : made when it is sent. ``statuses`` : all that are right. ``at_once`` : clients that send it."""

    name: str
    path: str
    body: Callable[[], bytes]
    statuses: tuple[int, ...] = (400,)
    at_once: int = 1


def _sent(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"prompt": "x", **BASE, **fields}).encode()


def _filled(text: str, piece: str, num: int) -> Callable[[], bytes]:
    """``text`` with many of ``piece`` where its # is; a @ in each is its number."""
    return lambda: text.replace("#", ",".join(piece.replace("@", str(number)) for number in range(num))).encode()


ATTACKS = [
    Attack(
        "a prediction of 10^6 characters, 8 choices",
        CHAT,
        lambda: json.dumps(
            {
                "messages": MESSAGES,
                "max_tokens": 200,
                "n": 8,
                "ignore_eos": True,
                "prediction": {"type": "content", "content": "ab " * 333_333},
            }
        ).encode(),
    ),
    Attack(
        "a prediction as long as the context, 8 choices",
        CHAT,
        lambda: json.dumps(
            {
                "messages": MESSAGES,
                "max_tokens": 100,
                "n": 8,
                "ignore_eos": True,
                "prediction": {"type": "content", "content": "x" * 230},
            }
        ).encode(),
        (200,),
    ),
    Attack("20,000 prompts, 128 choices each", COMPLETIONS, _sent(prompt=[[1]] * 20_000, n=128)),
    Attack("5 million prompts of one token", COMPLETIONS, _sent(prompt=[[1]] * 5_000_000), (413,)),
    Attack("100,000 prompts of one token", COMPLETIONS, _sent(prompt=[[1]] * 100_000)),
    Attack("as many choices as are taken", COMPLETIONS, _sent(prompt=[[1]] * 1024), (200, 503)),
    Attack("25 MB of unknown keys", COMPLETIONS, _filled("{#}", '"key@":1', 1_700_000), (413,)),
    Attack("unknown keys, as many as are read", COMPLETIONS, _filled("{#}", '"key@":1', 130_000)),
    Attack(
        "unknown keys in a part",
        COMPLETIONS,
        _filled('{"prompt":"x","stream":true,"stream_options":{#}}', '"key@":1', 130_000),
    ),
    Attack(
        "unknown keys in messages",
        CHAT,
        _filled('{"messages":[{"role":"user","content":"x",#}]}', '"key@":1', 130_000),
        (200, 400),
    ),
    Attack(
        "250,000 equal keys in logit_bias",
        COMPLETIONS,
        _filled('{"prompt":"x","max_tokens":2,"logit_bias":{#}}', '"5":1', 250_000),
        (413,),
    ),
    Attack(
        "130,000 equal keys in logit_bias",
        COMPLETIONS,
        _filled('{"prompt":"x","max_tokens":2,"logit_bias":{#}}', '"5":1', 130_000),
        (200,),
    ),
    Attack("4,096 biases", COMPLETIONS, _sent(logit_bias={str(token): 1 for token in range(4096)})),
    Attack("1,024 biases", COMPLETIONS, _sent(logit_bias={str(token): 1 for token in range(1024)}, n=64), (200,)),
    Attack("a key of 5,000 digits", COMPLETIONS, _sent(logit_bias={"9" * 5000: 1})),
    Attack("5 million allowed ids", COMPLETIONS, _sent(allowed_token_ids=[7] * 5_000_000), (413,)),
    Attack("130,000 allowed ids, 128 choices", COMPLETIONS, _sent(allowed_token_ids=[7] * 130_000, n=128), (200,)),
    Attack(
        "130,000 allowed ids, prompts of 200 lengths",
        COMPLETIONS,
        _sent(allowed_token_ids=[7] * 130_000, prompt=[[5] * length for length in range(1, 201)]),
        (200,),
    ),
    Attack("wrong allowed ids", COMPLETIONS, _sent(allowed_token_ids=["x"] * 130_000)),
    Attack("900 long bad words", COMPLETIONS, _sent(bad_words=["word " * 1000] * 900)),
    Attack(
        "bad words as long as they may be",
        COMPLETIONS,
        _sent(bad_words=[f"w{i} abcdefghij" for i in range(999)]),
        (200, 400),
    ),
    Attack("100,000 stop tokens", COMPLETIONS, _sent(stop_token_ids=["x"] * 100_000)),
    Attack("long stop strings", COMPLETIONS, _sent(stop=["a" * 10_000] * 100)),
    Attack("10^7 ids to detokenise", "/detokenize", _filled('{"tokens":[#]}', "5", 10_000_000), (413,)),
    Attack("65,000 ids to detokenise, 8 at once", "/detokenize", _filled('{"tokens":[#]}', "5", 65_000), (200,), 8),
    Attack(
        "20 long texts to tokenise",
        "/tokenize",
        lambda: json.dumps({"prompt": "word " * 26_000}).encode(),
        (200, 400, 503),
        20,
    ),
    Attack("a body of 100 MB", COMPLETIONS, lambda: b'{"prompt":"' + b"x" * 100_000_000 + b'"}', (413,)),
    Attack("a text far beyond the context", COMPLETIONS, _sent(prompt="x = 1\n" * 1_000_000)),
    Attack("long texts, 8 at once", COMPLETIONS, _sent(prompt="x = 1\n" * 20_000), (400, 503), 8),
    Attack("a long conversation", CHAT, lambda: json.dumps({"messages": MESSAGES * 60_000}).encode(), (413,)),
    Attack("as many messages as are taken", CHAT, lambda: json.dumps({"messages": MESSAGES * 4096}).encode(), (400,)),
    Attack("wrong messages", CHAT, lambda: json.dumps({"messages": [1] * 200_000}).encode()),
    Attack("lists within lists", COMPLETIONS, lambda: b"[" * 7_000_000, (413,)),
    Attack("a text of escapes", COMPLETIONS, lambda: b'{"prompt":"' + b"\\u00e9" * 1_300_000 + b'"}'),
    Attack(
        "a chain of 4,000 rules",
        COMPLETIONS,
        _sent(
            structured_outputs={
                "grammar": "start: a0\n" + "\n".join(f'a{i}: "x" a{i + 1}' for i in range(3800)) + '\na3800: "y"\n'
            }
        ),
        (200, 400),
    ),
    Attack(
        "a regular expression of a billion",
        COMPLETIONS,
        _sent(structured_outputs={"regex": "((a{1000}){1000}){1000}"}),
        (200, 400),
    ),
    Attack(
        "a long regular expression",
        COMPLETIONS,
        _sent(structured_outputs={"regex": "a?" * 2700 + "a" * 2700}),
        (200, 400),
    ),
    Attack(
        "many regular expressions, 20 at once",
        COMPLETIONS,
        _sent(structured_outputs={"regex": "(a{900}){1000}"}),
        (200, 400, 503),
        20,
    ),
    Attack(
        "log-probabilities without end", COMPLETIONS, _sent(n=128, max_tokens=200, logprobs=20, ignore_eos=True), (200,)
    ),
]
