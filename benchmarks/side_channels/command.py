"""Can sizes and times of answers tell what was asked? The published attacks, with the guards off and on.

``python -m benchmarks.side_channels [--prompts N] [--train N] [--test N] [--texts N] [--out FILE] [--json]``

1. *Which prompt?* (arXiv 2411.01076) Somebody on the path knows N prompts and has asked each several times. Then a
   victim asks each; from sizes and times of the records of the encrypted stream alone the attacker guesses which it
   was. Greedy and sampled, with streams as they come and with ``--obfuscation always``.
2. *Was it asked before?* An attacker with a key times its own requests for texts, half of which a victim has asked:
   under the attacker's own key, under another, and with a ``cache_salt`` of the victim's; with the guard on under its
   own, where nothing else keeps them apart.

Both against a real server of the bundled model in float32. Chance is 1/N and 1/2. Ends with a table and, with --json,
one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.environment import head
from benchmarks.faults.processes import Server
from benchmarks.side_channels import fingerprints
from benchmarks.side_channels.membership import Attack, Victim
from benchmarks.side_channels.wire import watch, watch_all
from benchmarks.workloads import snippets

_SERVER = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "1024")
_KEYS = ("attacker", "victim")
_PIECE_TOKENS = 16
_SLACK = 2.0
"""The clock leaves this many times what the model takes for a piece without drafts, alone."""
_PACED_AT_ONCE = 4
_PROMPT_CHARACTERS = 400
_CALIBRATING_TEXTS = 8
_TEMPERATURE = 0.3
_VICTIMS = {
    "own key": Victim("attacker"),
    "another key": Victim("victim"),
    "cache_salt": Victim("victim", {"cache_salt": "mine"}),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Play, print. Returns the exit status, 0."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.side_channels", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--prompts", type=int, default=50, help="known to the attacker (default: 50)")
    add("--train", type=int, default=3, help="times the attacker asks each (default: 3)")
    add("--test", type=int, default=2, help="times a victim does (default: 2)")
    add("--texts", type=int, default=24, help="that the victim asked, and as many it did not (default: 24)")
    add("--max-tokens", type=int, default=96, help="of each answer (default: 96)")
    add("--out", type=Path, metavar="FILE", help="write the result there as well")
    add("--json", action="store_true", help="end stdout with one JSON line")
    args = parser.parse_args(argv)
    parameters = {name: getattr(args, name) for name in ("prompts", "train", "test", "texts", "max_tokens")}
    texts = iter([text[-_PROMPT_CHARACTERS:] for text in snippets(seed=0)])
    prompts = [next(texts) for _ in range(args.prompts)]
    rows: list[dict[str, Any]] = []
    interval_s = 0.0
    for guard in ("off", "on"):
        options = ["--obfuscation", "always", "--obfuscation-interval", f"{interval_s:g}"] if guard == "on" else []
        with _serving(*options) as port:
            if guard == "off":
                interval_s = _interval(port, prompts[:8], args.max_tokens)
            for sampling, fields in (("greedy", {"temperature": 0}), ("sampled", {"temperature": _TEMPERATURE})):
                asked = {"max_tokens": args.max_tokens, **fields}
                at_once = 1 if guard == "off" else _PACED_AT_ONCE
                # All under one key, so that drafts come from one cache; after a first round all have been asked before.
                _, known, seen = (
                    watch_all(port, prompts, asked, "attacker", times=times, at_once=at_once)
                    for times in (1, args.train, args.test)
                )
                share, distance = fingerprints.rate(known, seen)
                _report(rows, "which prompt", sampling, guard, share, len(seen), 1 / args.prompts, by=distance)
            attack = Attack(port, args.max_tokens, "attacker")
            for whose, victim in _VICTIMS.items() if guard == "off" else [("own key", _VICTIMS["own key"])]:
                share = attack.rate(texts, victim, num_texts=args.texts, num_own=_CALIBRATING_TEXTS)
                _report(rows, "asked before", whose, guard, share, 2 * args.texts, 0.5)
    result = {
        **head("side_channels"),
        "parameters": {**parameters, "temperature": _TEMPERATURE, "interval_s": interval_s},
        "rows": rows,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        print(json.dumps(result))
    return 0


@contextmanager
def _serving(*options: str) -> Iterator[int]:
    with tempfile.TemporaryDirectory(prefix="side-channels-") as home:
        keys = Path(home) / "keys"
        keys.write_text("\n".join(_KEYS) + "\n")
        keys.chmod(0o600)
        server = Server(Path(home) / "server.log", *_SERVER, "--api-key-file", str(keys), *options)
        try:
            server.start()
            yield server.port
        finally:
            server.kill()


def _interval(port: int, prompts: Sequence[str], max_tokens: int) -> float:
    """Seconds for a piece: what the model takes without drafts, and some slack."""
    plain = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "num_speculative_tokens": 0}
    spent = [watch(port, {**plain, "cache_salt": "a", "prompt": prompt}, "attacker").times for prompt in prompts]
    a_token = statistics.median((times[-1] - times[0]) / (max_tokens - 1) for times in spent)
    return max(0.1, round(_SLACK * _PIECE_TOKENS * a_token, 2))


def _report(
    rows: list[dict[str, Any]],
    attack: str,
    what: str,
    guard: str,
    share: float,
    number: int,
    chance: float,
    **more: str,
) -> None:
    low, high = fingerprints.interval(share, number)
    print(
        f"{attack}, {what:<12} guard {guard:<3} {share:6.1%} [{low:.1%}, {high:.1%}], chance {chance:.1%}", flush=True
    )
    row = {"attack": attack, "what": what, "guard": guard, "rate": round(share, 4), "chance": round(chance, 4)}
    rows.append({**row, "interval": [round(low, 4), round(high, 4)], "number": number, **more})
