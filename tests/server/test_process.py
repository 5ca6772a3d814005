"""``ssd-serve`` as a process: start, errors at start, signals."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.servers import free_port
from ssd.bundled import MODEL_PATH
from tests.server.client import answers, get, greedy_completion, metric, post, until_ready
from tests.waiting import PATIENCE_S, START_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--device", "cpu", "--max-num-seqs", "2", "--max-model-len", "256", "--cache-tokens", "65536")


def refused(*arguments: str) -> str:
    """Run a server that cannot start; returns its one line of complaint."""
    done = subprocess.run(
        [sys.executable, "-m", "server", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=START_S
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    complaints = [line for line in done.stderr.splitlines() if line.startswith("ssd-serve: error: ")]
    assert len(complaints) == 1, done.stderr
    assert done.stderr.splitlines()[-1] == complaints[0]
    return complaints[0]


@contextmanager
def running(
    *arguments: str,
    before: Callable[[], object] = lambda: signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    ),  # the tests may be run by nohup
    stderr: int | None = None,
    program: str = "server",
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server process; ``before`` is called in it before it becomes one. ``program`` : or ``tests.fixed_times``."""
    port = free_port()
    command = [sys.executable, "-m", program, "--port", str(port), *arguments]
    process = subprocess.Popen(command, cwd=ROOT, preexec_fn=before, stderr=stderr)
    try:
        yield process, port
    finally:
        process.kill()
        process.wait()


def cache_tokens(port: int) -> float:
    return metric(port, "ssd:cache_tokens")


def num_running(port: int) -> float:
    return metric(port, "vllm:num_requests_running")


def test_port_in_use_is_found_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        started = time.monotonic()
        assert "--port" in refused("--port", str(taken.getsockname()[1]))
        assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--host", "no such host"), "--host"),
        (("--api-key-file", "/no/such/file"), "--api-key-file /no/such/file"),
        (("--generation-config", str(ROOT / "tests")), "generation_config.json"),
    ],
)
def test_unusable_arguments_end_in_one_line(arguments: tuple[str, ...], hint: str) -> None:
    assert hint in refused("--port", "0", *arguments)


def test_a_checkpoint_that_lacks_layers_is_not_served(tmp_path: Path) -> None:
    for path in MODEL_PATH.iterdir():
        shutil.copy(path, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 8}))
    assert "lacks 18 of the weights" in refused("--port", "0", *SMALL, str(tmp_path))


def test_a_start_says_what_it_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = ("--host", "::1", "--port", "0", *SMALL, "--cache-dir", str(tmp_path / "c"), "--log-level", "debug")
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", "server", *arguments], cwd=ROOT, stderr=file)
    try:
        wait_until(lambda: "ready after" in log.read_text() or process.poll() is not None, START_S)
        if "--host ::1" in log.read_text() or "cannot listen" in log.read_text():
            pytest.skip("a machine without IPv6")
        wait_until(lambda: "configuration" in log.read_text() or process.poll() is not None, START_S)
        ready = next(line for line in log.read_text().splitlines() if "ready after" in line)
        assert "http://[::1]:" in ready and len(ready) < 160
        configuration = next(line for line in log.read_text().splitlines() if "configuration" in line)
        facts = ("device=cpu", "dtype=float32", "slots=2", "context=256", "cache_tokens=64K")
        for fact in (*facts, f"cache_dir={tmp_path}", "redis=none", "tenants=none"):
            assert fact in configuration
    finally:
        process.kill()
        process.wait()


def stopped_line(log: str) -> str:
    """The one line that says how it ended."""
    (line,) = (line for line in log.splitlines() if "stopped: " in line)
    return line.partition("stopped: ")[2]


LONG = {"prompt": "x = 1\n", "max_tokens": 200, "n": 4, "temperature": 0, "ignore_eos": True}
"""Long enough to be running still when the signal comes, whatever the machine."""


def test_sigterm_lets_requests_in_flight_end_and_keeps_what_was_learned(tmp_path: Path) -> None:
    directory = str(tmp_path / "cache")
    with running(*SMALL, "--cache-dir", directory, stderr=subprocess.PIPE) as (process, port):
        wait_until(lambda: answers(port, "/live"), START_S)
        until_ready(port, process)
        assert get(port, "/v1/models").json["data"][0]["max_model_len"] == 256
        assert directory in refused("--port", "0", *SMALL, "--cache-dir", directory)

        with ThreadPoolExecutor(2) as pool:
            whole = pool.submit(post, port, "/v1/completions", LONG)
            streamed = pool.submit(post, port, "/v1/completions", {**LONG, "stream": True})
            wait_until(lambda: num_running(port) > 0)
            process.send_signal(signal.SIGTERM)
            refusal = post(port, "/v1/completions", LONG)  # at once, while the others go on
            assert (refusal.status, refusal.error["code"]) == (503, "not_ready")
            assert (refusal.headers["retry-after"], refusal.headers["connection"]) == ("1", "close")
            health = get(port, "/health")
            assert (health.status, health.json["status"]) == (503, "stopping")
            assert get(port, "/live").status == 200
            assert whole.result().json["usage"]["completion_tokens"] == 800
            reasons = [choice["finish_reason"] for event in streamed.result().events for choice in event["choices"]]
            assert reasons.count("length") == 4
        ended = time.monotonic()
        _, log = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0 and time.monotonic() - ended < 10
        assert stopped_line(log.decode()).startswith("2 requests in flight ended, 0 were aborted after ")
        assert stopped_line(log.decode()).endswith("the cache is flushed")

    # What was learned is there again after a restart.
    with running(*SMALL, "--cache-dir", directory) as (process, port):
        until_ready(port, process)
        assert cache_tokens(port) >= 200
        process.send_signal(signal.SIGINT)  # nothing is under way
        began = time.monotonic()
        assert process.wait(PATIENCE_S) == 0 and time.monotonic() - began < 15


def test_a_server_killed_while_grammars_compile_leaves_its_cache_to_one_of_two_that_start(tmp_path: Path) -> None:
    arguments = (*SMALL, "--cache-dir", str(tmp_path / "cache"))
    with running(*arguments) as (process, port), ThreadPoolExecutor(4) as clients:
        until_ready(port, process)
        greedy_completion(port, prompt="import os\n", max_tokens=40, ignore_eos=True)
        wait_until(lambda: list((tmp_path / "cache").glob("default/*.seg")) != [])
        grammars = [
            {"prompt": "x", "structured_outputs": {"regex": f"(a{{900}}){{{1000 + number}}}"}} for number in range(4)
        ]
        asked = [clients.submit(post, port, "/v1/completions", grammar) for grammar in grammars]
        wait_until(lambda: metric(port, "ssd:http_requests_in_progress") >= 4)
        process.kill()
        assert all(isinstance(each.exception(), OSError | http.client.HTTPException) for each in asked)
    log = tmp_path / "log"
    with (
        log.open("ab") as file,
        running(*arguments, stderr=file.fileno()) as (one, first),
        running(*arguments, stderr=file.fileno()) as (other, second),
    ):
        wait_until(lambda: one.poll() is not None or other.poll() is not None, START_S)
        (ended, served, port) = (one, other, second) if other.poll() is None else (other, one, first)
        (complaint,) = (line for line in log.read_text().splitlines() if line.startswith("ssd-serve: error: "))
        assert (
            ended.returncode == 2
            and "another process writes" in complaint
            and "default. Stop that process" in complaint
        )
        until_ready(port, served)
        assert cache_tokens(port) >= 40


@pytest.mark.parametrize("arguments", [("--shutdown-timeout", "0.2"), ()])
def test_requests_are_cut_after_the_timeout_or_at_a_second_signal(arguments: tuple[str, ...]) -> None:
    with running(*SMALL, *arguments, stderr=subprocess.PIPE) as (process, port), ThreadPoolExecutor(2) as pool:
        until_ready(port, process)
        whole = pool.submit(post, port, "/v1/completions", {**LONG, "n": 128})
        streamed = pool.submit(post, port, "/v1/completions", {**LONG, "n": 128, "stream": True})
        wait_until(lambda: num_running(port) > 0)
        process.send_signal(signal.SIGTERM)
        if not arguments:
            wait_until(lambda: not answers(port, "/health"))
            process.send_signal(signal.SIGTERM)
        assert (whole.result().status, whole.result().error["code"]) == (503, "not_ready")
        assert streamed.result().events[-1]["error"]["code"] == "not_ready"
        _, log = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        assert stopped_line(log.decode()).startswith("0 requests in flight ended, 2 were aborted after ")
        assert "ERROR" not in log.decode() and "Traceback" not in log.decode()


@pytest.mark.slow
def test_a_signal_while_the_kernels_of_drafts_compile_ends_with_status_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two of 27 processes that ended in order took LLVM away from the thread that was in it: status -11 or -6."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    with running(*SMALL, stderr=subprocess.PIPE) as (process, port):
        wait_until(lambda: answers(port, "/health"), START_S)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        assert "the cache is flushed" in stopped_line(log.decode())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_loading_ends_at_once_with_status_0(number: signal.Signals) -> None:
    with running(*SMALL) as (process, port):
        wait_until(lambda: answers(port, "/live"), START_S)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("arguments", [("--wram", "x"), ("--warm", "nowhere"), ()])
def test_every_line_of_a_json_log_is_json(arguments: tuple[str, ...], tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("log-format: json\napi-key: sesame\n")
    config.chmod(0o644)  # a warning, before anything else is known
    command = [sys.executable, "-m", "server", "--port", "0", *SMALL, "--config", str(config), *arguments]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(json.loads(line))
            if lines[-1]["message"].startswith("loading"):
                process.terminate()
    assert process.returncode == (2 if arguments else 0)
    assert "chmod 600" in lines[0]["message"] or arguments[:1] == ("--wram",)
    assert lines[-1]["level"] == ("error" if arguments else "info")
    assert arguments[:1] == () or arguments[0].strip("-") in lines[-1]["message"]


_BREAKS = """
import sys
from server.command.arguments import parse_arguments
from server.command.start import main
from ssd.engine.engine import Engine
from ssd.model.runners.slot_runner import SlotRunner

warm_up = Engine.warm_up

def failing(*arguments, **options):
    raise MemoryError("the device is gone")

def warm_up_and_break(engine, patience_s):
    warm_up(engine, patience_s)
    SlotRunner.forward = failing

Engine.warm_up = warm_up_and_break
sys.exit(main(parse_arguments(sys.argv[1:])))
"""


def test_an_engine_that_ends_answers_500_and_ends_the_process_with_status_1(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-c", _BREAKS, "--port", str(port), *SMALL, "--cache-dir", str(tmp_path / "cache")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        until_ready(port, process)
        answer = post(port, "/v1/completions", {"prompt": "import os\n", "max_tokens": 8})
        assert answer.status == 500
        assert answer.error["code"] in ("request_failed", "engine_failed")
        _, log = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert "the model can no longer run a forward pass: the device is gone" in log
    finally:
        process.kill()
        process.communicate()
