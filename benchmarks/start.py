"""What a start takes: seconds and memory by phase, until passes are made.

``python -m benchmarks.start [MODEL | --shape gemma3-270m|tiny]``

A random model of the shape is written first, in bfloat16 as most are published; its start is a process of its own, so
that nothing is there before. Prints a table; the last line of stdout is one JSON object. Kernels are compiled by a
first start and read from disk by the others, of which medians are shown.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environment import model_name
from benchmarks.run import Option, Run

SHAPES: dict[str, dict[str, Any]] = {
    "gemma3-270m": {
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32_768,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "gemma3_text",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
}
"""The first is cut as Gemma 3 270M. The tiny one is for a look at the script."""

_SLOTS, _LENGTH = 8, 2048


OPTIONS = {
    "shape": Option(default=None, choices=sorted(SHAPES), help="random weights of this shape, no model"),
    "rounds": Option(default=3, help="starts after the first"),
}
COLUMNS = (
    ("phase", "{phase}"),
    (">seconds", "{seconds:.2f}"),
    (">CPU s", "{cpu_s:.2f}"),
    (">bytes then", "{rss_bytes:,}"),
    (">at most", "{peak_bytes:,}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    if argv is None and sys.argv[1:2] == ["phases-of"]:
        print(json.dumps(phases(sys.argv[2])))
        return 0
    run = Run("start", __doc__, argv, OPTIONS, COLUMNS, has_model=True, unsaid=("shape",))
    args = run.args
    with tempfile.TemporaryDirectory() as folder:
        if args.shape is not None:
            write_random_model(args.shape, Path(folder))
        starts = [_start(str(args.model) if args.shape is None else folder) for _ in range(1 + args.rounds)]
    for phase in zip(*(start["phases"] for start in starts[1:]), strict=True):
        run.row(_medians(phase))
    run.parameters |= {"slots": _SLOTS, "length": _LENGTH}
    return run.end(
        model=f"random weights, shape {args.shape}" if args.shape else model_name(args.model),
        weight_bytes=starts[0]["weight_bytes"],
        kv_cache_bytes=starts[0]["kv_cache_bytes"],
        seconds=[round(sum(phase["seconds"] for phase in start["phases"]), 2) for start in starts],
        cpu_s=[round(sum(phase["cpu_s"] for phase in start["phases"]), 2) for start in starts],
        rows=run.rows,
    )


def phases(model_path: str) -> dict[str, Any]:
    """One start in this process, as the server makes it but for tokenizer and cache."""
    found: list[dict[str, Any]] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        began, cpu = time.perf_counter(), time.process_time()
        yield
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        found.append(
            {
                "phase": name,
                "seconds": time.perf_counter() - began,
                "cpu_s": time.process_time() - cpu,
                "rss_bytes": int(status["VmRSS"].split()[0]) * 1024,
                "peak_bytes": int(status["VmHWM"].split()[0]) * 1024,
            }
        )

    with phase("imports"):
        from ssd.config import DraftConfig
        from ssd.drafting import make_drafter
        from ssd.engine import Engine
        from ssd.model.loading.load_target import load_model, open_target
        from ssd.model.loading.memory import weight_bytes
        from ssd.model.loading.threads import settle_threads
        from ssd.model.ways.slot_target import SlotTarget
    draft = DraftConfig()
    with phase("read weights"):
        model = load_model(model_path, device="cpu")
    loaded = weight_bytes(model)
    with phase("open"):
        target = open_target(model, num_slots=_SLOTS, max_length=_LENGTH, max_draft_tokens=draft.num_speculative_tokens)
    with phase("threads"):
        settle_threads(target)
    with phase("warm up"):
        Engine(target, drafter=make_drafter("ssd", draft), draft=draft, eos_token_ids=()).warm_up()
    held = weight_bytes(model)
    kv_cache = target.kv_cache if isinstance(target, SlotTarget) else None
    return {
        "phases": found,
        "weight_bytes": {"loaded": loaded.total, "plain": held.plain, "packed": held.packed},
        "kv_cache_bytes": kv_cache and kv_cache.bytes_per_token * kv_cache.num_slots * kv_cache.max_length,
    }


def write_random_model(shape: str, out: Path) -> None:
    """A model of ``SHAPES[shape]``, in bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**SHAPES[shape])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(out)


def _start(model: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.start", "phases-of", model]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _medians(phase: Sequence[dict[str, Any]]) -> dict[str, Any]:
    numbers = {name: round(median(each[name] for each in phase), 3) for name in phase[0] if name != "phase"}
    return {"phase": phase[0]["phase"], **numbers}


if __name__ == "__main__":
    sys.exit(main())
