"""``ssd-serve doctor``: report in up to 25 lines whether a server with these options would draft on this machine."""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from server.base.settings import VERSION
from server.command.arguments import Options
from server.command.checks import check_before_loading, check_directory
from server.command.start import EngineLoader
from server.observe.logs import set_up_logging
from ssd.config import SamplingParams
from ssd.errors import ConfigError, SSDError, first_line
from ssd.jit.code_cache import kernel_counts, machine_code_directory
from ssd.numbers import format_number

if TYPE_CHECKING:
    from ssd.engine import Engine

_FEATURES = ("avx2", "fma", "bmi2", "avx512f", "avx512bf16", "amx-bf16", "neon", "sve")
"""CPU features that our compiled kernels or torch's matrix products use."""
_MAX_PASS_COST = 10.0
"""The cost of a 16-token forward pass, relative to a single-token pass, above which drafts rarely gain anything."""
_OUTPUT_TOKENS = 32
_WIDEST = 65
"""The maximum number of tokens per sequence in the forward passes that ``ssd-serve doctor`` times."""


class Report:
    """Prints one line for each check of ``ssd-serve doctor``, and counts failed checks."""

    def __init__(self) -> None:
        self.num_failed = 0

    def line(self, name: str, text: str, *, is_ok: bool = True) -> None:
        self.num_failed += not is_ok
        print(f"{'ok  ' if is_ok else 'FAIL'}  {name:<16} {' '.join(text.split())}", flush=True)

    def check(self, name: str, find: Callable[[], str]) -> None:
        try:
            self.line(name, find())
        except Exception as error:  # any error is the result of the check
            text = str(error) if isinstance(error, SSDError) else f"{type(error).__name__}: {first_line(error)}"
            self.line(name, text, is_ok=False)


def main(options: Options) -> int:
    """Check the machine, the cache directory, Redis and the model. Returns 0 if all checks pass, else 1."""
    set_up_logging("error", "text")
    report, directory, redis_url = Report(), options.cache.config.directory, options.cache.config.redis_url
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "numba"))
    report.line("versions", f"ssd {VERSION}, Python {platform.python_version()}, {libraries}")
    report.line("CPU", _cpu())
    report.check("options", lambda: check_before_loading(options) or "consistent")  # type: ignore[func-returns-value]
    if directory is None:
        report.line("cache dir", "none: the cache is lost when the server ends (--cache-dir stores it)")
    else:
        report.check("cache dir", lambda: check_directory(directory))
    if redis_url is not None:
        report.check("Redis", lambda: _check_redis(redis_url))
    with ExitStack() as resources:
        engines: list[Engine] = []
        report.check("model", lambda: _load(options, resources, engines))
        for engine in engines:
            _report_engine(report, engine, options.cache.namespace)
    num_failed = report.num_failed
    print(f"{num_failed} of the checks failed" if num_failed else "a server with these options drafts")
    return 1 if num_failed else 0


def _cpu() -> str:
    import torch
    from llvmlite import binding

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    found = binding.get_host_cpu_features()
    features = [name for name in _FEATURES if found.get(name)]
    return f"{model or platform.machine()}; {torch.get_num_threads()} threads; {' '.join(features)}"


def _check_redis(url: str) -> str:
    """Write, read and delete a Redis stream with the commands that replicas use to share text."""
    from ssd.replication.connection import connect, redact_password, redacted_address

    client, key = connect(url), f"ssd:doctor:{secrets.token_hex(8)}"
    try:
        began = time.perf_counter()
        client.ping()
        seconds = time.perf_counter() - began
        client.xadd(key, {"t": b""}, maxlen=1)
        client.xrange(key)
        client.delete(key)
    except Exception as error:
        raise ConfigError(f"{redacted_address(url)}: {redact_password(first_line(error), url)}") from error
    finally:
        client.close()
    return f"{redacted_address(url)} answers within {1e3 * seconds:.1f} ms; streams can be written and read"


def _load(options: Options, resources: ExitStack, engines: list[Engine]) -> str:
    """Load the model with an empty cache in memory, append the engine to ``engines``, and describe it in one line."""
    alone = replace(options, cache=replace(options.cache, cache_dir=None, redis=None, warm_directories=()))
    began = time.perf_counter()
    engine = EngineLoader(alone)(resources)
    resources.callback(engine.close)
    engine.warm_up()
    engines.append(engine)
    target = engine.target
    return (
        f"{options.model.name}: {type(target.model).__name__}, {str(target.dtype).removeprefix('torch.')} on "
        f"{target.device}, {target.backend}; {target.num_slots} slots of {format_number(engine.max_model_len)} tokens; "
        f"loaded and warmed up in {time.perf_counter() - began:.1f} s"
    )


def _report_engine(report: Report, engine: Engine, namespace: str) -> None:
    import torch

    from ssd.engine.pass_timing import timed_passes

    counts, invariance, speculation = kernel_counts(), engine.target.batch_invariance, engine.speculation
    report.line("threads", f"{torch.get_num_threads()} for forward passes of this model")
    report.line(
        "kernels",
        f"{counts.prebuilt} prebuilt, {counts.cached} cached, {counts.compiled} compiled in "
        f"{counts.compile_seconds:.1f} s; kept in {machine_code_directory() or 'no directory'}",
    )
    report.line("batch invariance", str(invariance))
    report.line("speculation", speculation.reason, is_ok=speculation.active)
    if not engine.is_speculating:
        return
    times = timed_passes(engine.target, min(_WIDEST, engine.max_model_len))
    for num_rows in sorted({rows for rows, _ in times}):
        found = ", ".join(f"{width}: {1e3 * s:.2f}" for (rows, width), s in sorted(times.items()) if rows == num_rows)
        report.line("pass times", f"{num_rows} sequence{'s' * (num_rows > 1)}, ms by tokens of each: {found}")
    cost, token = engine.relative_pass_cost(16), engine.relative_pass_cost(17) - engine.relative_pass_cost(16)
    report.line(
        "draft cost",
        f"a pass of 16 tokens takes {cost:.2f} single-token passes, each draft token {token:.3f}",
        is_ok=cost <= _MAX_PASS_COST,
    )
    report.check("a repeat", lambda: _repeat(engine, namespace))


def _repeat(engine: Engine, namespace: str) -> str:
    """Send the same greedy request twice, to check that drafts work.

    Raises ConfigError if the second request took more than one forward pass per two output tokens.
    """
    sampling = SamplingParams(max_tokens=_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    passes = [
        list(engine.generate([[1, 2, 3]], sampling, namespace=namespace))[-1].stats.num_verify_steps for _ in "12"
    ]
    text = f"a request of {_OUTPUT_TOKENS} tokens took {passes[0]} passes, the same request again {passes[1]}"
    if 2 * passes[1] > _OUTPUT_TOKENS:
        raise ConfigError(f"{text}: drafts hardly shorten a repeated request")
    return text
