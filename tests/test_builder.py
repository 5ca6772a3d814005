"""The ``ssd-cache`` command, run as a user would."""

from __future__ import annotations

import gzip
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ssd
from cache_builder.__main__ import main
from ssd.text.codec import TextCodec
from tests.cache_files import read_cache
from tests.redis_server import redis_server
from tests.reference.text import chat_examples
from tests.sharing_replica import eventually
from tests.tokenizers_for_tests import write_model_directory
from tests.waiting import PATIENCE_S

__all__ = ["redis_server"]  # the fixture

ROOT = Path(ssd.__file__).parent.parent
USER = {"role": "user", "content": "hello"}
CHAT = [USER, {"role": "assistant", "content": "hi there"}]


def write_lines(path: Path, *lines: Any) -> str:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def build(model: Path, out: Path, *arguments: str) -> int:
    return main(["build", *arguments, "--tokenizer", str(model), "--out", str(out)])


def test_ids_are_those_of_the_server_path(model: Path, codec: TextCodec, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write_lines(
        tmp_path / "in.jsonl",
        {"messages": CHAT},
        "",
        {"prompt": "2+2=", "completion": "4"},
        {"text": "a document"},
        {"request": {"model": "m", "messages": [USER]}, "response": {"choices": [{"message": CHAT[1]}]}},
        {"request": {"body": {"prompt": "1+"}}, "response": {"body": {"choices": [{"text": "1"}, {"text": "2"}]}}},
    )
    assert build(model, tmp_path / "out", path) == 0
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = tokenizer.apply_chat_template([USER], add_generation_prompt=True, tokenize=True, return_dict=False)
    chat += [*tokenizer.encode("hi there", add_special_tokens=False), 0]

    def completion(prompt: str, text: str) -> list[int]:
        return [*tokenizer.encode(prompt), *tokenizer.encode(text, add_special_tokens=False), 0]

    assert read_cache(tmp_path / "out", codec.fingerprint) == [
        chat,
        completion("2+2=", "4"),
        [*tokenizer.encode("a document"), 0],
        chat,
        completion("1+", "1"),
        completion("1+", "2"),
    ]


def test_a_conversations_history_is_stored_once(model: Path, codec: TextCodec, tmp_path: Path) -> None:
    long = "a rather long question about nothing in particular. " * 20
    turns = [{"role": "user", "content": long}, CHAT[1], {"role": "user", "content": "and?"}, CHAT[1]]
    assert build(model, tmp_path / "out", write_lines(tmp_path / "in.jsonl", {"messages": turns})) == 0
    first, second = read_cache(tmp_path / "out", codec.fingerprint)
    assert first == chat_examples(codec, turns)[0].token_ids
    whole = chat_examples(codec, turns)[1].token_ids
    assert len(second) < len(whole) // 2
    assert whole[-len(second) :] == second


def test_text_compressed_text_and_standard_input(
    model: Path, codec: TextCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("plain\ntext")
    (tmp_path / "b.md.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "line"}'))
    (tmp_path / "empty.txt").write_text("\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "piped"}\n')))
    names = [str(tmp_path / name) for name in ("a.txt", "b.md.gz", "c.jsonl.gz", "empty.txt")]
    assert build(model, tmp_path / "out", *names, "-") == 0
    texts = ["plain\ntext", "packed", "line", "piped"]
    assert read_cache(tmp_path / "out", codec.fingerprint) == [
        codec.encode_text_example(text).token_ids for text in texts
    ]


def test_inspect_reports_and_finds_damage(
    model: Path, codec: TextCodec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert build(model, out, write_lines(tmp_path / "in.jsonl", {"text": "x"}), "--namespace", "support") == 0
    capsys.readouterr()
    assert main(["inspect", str(out)]) == 0
    assert "support" in (text := capsys.readouterr().out) and codec.fingerprint in text
    assert main(["inspect", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_intact"]
    assert report["num_tokens"] == len(read_cache(out, codec.fingerprint)[0])
    (file,) = out.glob("*.seg")
    assert report["num_bytes"] == file.stat().st_size
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    assert main(["inspect", str(out), "--json"]) == 1
    assert "checksum" in json.loads(capsys.readouterr().out)["segments"][0]["error"]
    file.unlink()
    assert main(["inspect", str(out)]) == 1
    assert "missing" in capsys.readouterr().out


def test_the_program_runs_without_torch(model: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", {"messages": CHAT})
    code = (
        "import sys, cache_builder.__main__ as program; status = program.main();"
        "print(status, sys.modules.get('torch'), [name for name in sys.modules if name.startswith('torch.')])"
    )
    arguments = ["build", path, "--tokenizer", str(model), "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "0 None []"
    assert done.stderr == ""


def test_help_and_version_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--help"], "usage: ssd-cache"),
        (["build", "--help"], "usage: ssd-cache build"),
        (["--version"], f"ssd-cache {ssd.__version__}\n"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0 and said in capsys.readouterr().out


# -- other people's files --------------------------------------------------------------------------------------------


def test_other_names_are_understood(model: Path, codec: TextCodec, tmp_path: Path) -> None:
    pair = write_lines(tmp_path / "pair.jsonl", {"prompt": "a", "completion": "b"})
    alpaca = write_lines(tmp_path / "alpaca.jsonl", {"instruction": "a", "output": "b"})
    named = ["--field", "prompt=instruction", "--field", "completion=output"]
    assert build(model, tmp_path / "f", pair) == build(model, tmp_path / "g", alpaca, *named) == 0
    assert read_cache(tmp_path / "f", codec.fingerprint) == read_cache(tmp_path / "g", codec.fingerprint)
    assert build(model, tmp_path / "e", alpaca, "--field", "output") == 0
    assert read_cache(tmp_path / "e", codec.fingerprint) == [codec.encode_text_example("b").token_ids]


def test_a_chat_template_may_be_given(tmp_path: Path) -> None:
    plain = write_model_directory(tmp_path / "model", chat_template=None)
    path = write_lines(tmp_path / "a.jsonl", {"messages": CHAT})
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert build(plain, tmp_path / "out", path, "--chat-template", str(template)) == 0


# -- builds that end early, and files that come again ----------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_build_that_is_ended_leaves_nothing(number: signal.Signals, model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cache_builder", "build", "-", "--tokenizer", str(model)]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        eventually(lambda: [*tmp_path.glob(".out.unfinished")] or process.poll() is not None)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == (128 + number if number is signal.SIGTERM else -number)
        assert [*tmp_path.iterdir()] == [] or number is signal.SIGKILL
        assert process.stderr is not None
        if number is signal.SIGTERM:
            assert process.stderr.read() == "ssd-cache: terminated\n"
    assert build(model, tmp_path / "out", write_lines(tmp_path / "a.jsonl", {"text": "a"})) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]


@pytest.mark.parametrize("where", ["in a finaliser", "while something is made"])
def test_a_signal_ends_it_in_one_line_wherever_it_arrives(where: str) -> None:
    script = """
import os, signal, sys, time
import cache_builder.__main__ as program
from cache_builder.commands import purge

class Closed:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

class HalfMade:
    def __init__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        self.handle = 0

    def __del__(self):
        print(self.handle)

def run(options):
    Closed() if where == "in a finaliser" else HalfMade()
    time.sleep(60)

purge.run = run
where = sys.argv[1]
sys.argv = ["ssd-cache", "purge", "--namespace", "a"]
sys.exit(program.main())
"""
    command = [sys.executable, "-c", script, where]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)
    assert ended.stderr == "ssd-cache: terminated\n"
    assert ended.returncode == 128 + signal.SIGTERM
