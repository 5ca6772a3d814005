"""What ``ssd-cache`` cannot do is one line that says why, and nothing is changed."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cache_builder.__main__ import main
from cache_builder.building.resumable import working_directory
from ssd.bundled import MODEL_PATH
from ssd.text.codec import TextCodec
from tests.cache_files import write_cache
from tests.tokenizers_for_tests import write_model_directory

LINE = b'{"text": "x"}\n'
TORN_ARRAYS = [
    "[",
    '[{"text": "a"}',
    '[{"text": "a"} {"text": "b"}]',
    '[{"text": ]',
    '[{"text": "a"},]',
    '[{"text": "a"}]]',
]
FILES = {
    "text.jsonl": LINE,
    "chat.jsonl": b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
    "pair.jsonl": b'{"prompt": "a", "completion": "b"}\n',
    "asked.jsonl": b'{"messages": [{"role": "user", "content": "a"}]}\n',
    "cut.jsonl.gz": gzip.compress(os.urandom(999) + LINE)[:500],
    "no.txt.gz": b"not gzip",
    "no.jsonl.zst": b"not zstd at all",
    "cut.jsonl.zst": bytes(pa.compress(LINE, "zstd", asbytes=True))[:-3],
    "latin.txt": "é".encode("latin-1"),
    "empty.txt": b"",
    "notes.txt": b"Nobody asked for this.",
    "notes/diary.txt": b"mine",
    "dir/manifest.json/x": b"",
    "damaged/manifest.json": b"{",
    "large.json": b" " * (2 << 20),
    "ids.json": b"[1]",
    "negative.json": b"[1, -1]",
    "object.json": b"{}",
    "none.json": b"[]",
    "brace.json": b"{",
    "deep.json": b"[" * 100_000,
    **{f"torn{number}.json": text.encode() for number, text in enumerate(TORN_ARRAYS)},
}
BUILD = "--tokenizer MODEL --out out"
PUSH = "--namespace default --redis redis://:hidden@127.0.0.1:1/0"
ERRORS = {
    f"build missing.txt {BUILD}": "does not exist",
    f"build cut.jsonl.gz {BUILD}": "damaged gzip",
    f"build no.txt.gz {BUILD}": "damaged gzip",
    f"build no.jsonl.zst {BUILD}": "damaged zstd",
    f"build cut.jsonl.zst {BUILD}": "cut.jsonl.zst contains damaged zstd data (it ends too early)",
    f"build latin.txt {BUILD}": "not UTF-8",
    f"build empty.txt {BUILD}": "nothing was built",
    f"build bare {BUILD}": "is a directory without",
    f"build *.parquet {BUILD}": "no file matches",
    f"build nowhere://x {BUILD}": "nowhere://x cannot be reached: ",
    f"build asked.jsonl {BUILD}": "1 of 1 records have no answer",
    f"build text.jsonl {BUILD} --namespace no/way": "namespace",
    f"build text.jsonl {BUILD} --chat-template latin.txt": "latin.txt is not UTF-8",
    "build chat.jsonl --tokenizer silent --out out": "--chat-template FILE",
    "build text.jsonl --tokenizer nowhere/else --out out": "no tokenizer",
    "build text.jsonl --tokenizer MODEL --out warm": "--force",
    "build text.jsonl --tokenizer MODEL --out notes --force": "contains no cache",
    "merge warm --out busy": "another process",
    **{
        f"build torn{number}.json {BUILD}": f"torn{number}.json is not a JSON array"
        for number in range(len(TORN_ARRAYS))
    },
    **{
        f"build text.jsonl {BUILD} " + " ".join(f"--field {name}" for name in fields.split()): "--field"
        for fields in ("other=x", "text=", "a b", "prompt=x", "text=a prompt=b")
    },
    "merge warm foreign --out out": "of one tokenizer",
    "merge warm support --out out": "set the namespace of the merged cache with --namespace",
    "merge warm torn --out out": "is damaged",
    "merge warm --out warm": "--force",
    **{
        f"{command} {path}{more}": says
        for command, more in (("inspect", ""), ("push", f" {PUSH}"))
        for path, says in (
            ("ids.json", "is not a directory"),
            ("none", "contains no cache"),
            ("dir", "not a regular file"),
        )
    },
    "inspect damaged": "is damaged",
    "inspect --deep bare": "no manifest.json",
    "inspect warm --sequences --tokenizer BUNDLED": "was made with tokenizer",
    f"push warm {PUSH}": "did not accept the push, which failed at the first entries",
    **{f"redis-status --redis {kind}://:hidden@127.0.0.1:1": "does not answer" for kind in ("redis", "redis-cluster")},
    "evaluate nothing.jsonl": "does not exist",
    "evaluate empty.txt": "the logs contain no prompt with an answer",
    "evaluate notes.txt": "the logs contain no prompt with an answer",
    "evaluate asked.jsonl": "contain no prompt with an answer",
    "evaluate pair.jsonl --cache frozen": "give --warm DIR",
    "evaluate chat.jsonl --tokenizer MODEL --warm bare": "bare contains no cache",
    "evaluate pair.jsonl --draft-limit 200": "num_speculative_tokens must be within",
    "evaluate pair.jsonl --cost text.jsonl": "text.jsonl contains no cost curve",
    "evaluate pair.jsonl --cost large.json": "is not a cost curve",
    "evaluate pair.jsonl --save-cost x.json": "add --measure MODEL",
    "prune warm --budget 400 --logs chat.jsonl": "contains a cache already",
    "prune warm --budget 400 --logs none.jsonl --tokenizer MODEL --out out": "does not exist",
    "prune warm --budget 400 --logs chat.jsonl --tokenizer BUNDLED --out out": "was made with tokenizer",
    "explain warm --prompt negative.json": "must be an object with",
    "explain warm --prompt object.json": "or an array of token ids",
    "explain warm --prompt none.json": "give a file that contains text",
    "explain warm --prompt brace.json": "not valid JSON",
    "explain warm --prompt deep.json": "not valid JSON",
    "explain warm --prompt ids.json --draft-limit 0": "--draft-limit must be within",
    "explain warm --prompt notes.txt": "was made with tokenizer",
    "explain warm --prompt notes.txt --tokenizer BUNDLED": "was made with tokenizer",
}


def content(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in place.rglob("*")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, codec: TextCodec) -> Path:
    """A directory of files and caches, most of which are of no use."""
    place = tmp_path_factory.mktemp("place")
    for name, data in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
    (place / "bare").mkdir()
    write_model_directory(place / "silent", chat_template=None)
    for name, fingerprint, namespace in (
        ("warm", codec.fingerprint, "default"),
        ("torn", codec.fingerprint, "default"),
        ("support", codec.fingerprint, "support"),
        ("foreign", "f" * 32, "default"),
    ):
        write_cache(place / name, [[1, 2, 3] * 6], fingerprint=fingerprint, namespace=namespace)
    (segment,) = (place / "torn").glob("*.seg")
    segment.write_bytes(segment.read_bytes()[:-1])
    return place


@pytest.mark.parametrize("command", ERRORS)
def test_what_cannot_be_done_is_one_line_and_changes_nothing(
    command: str, place: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    with working_directory(Path("busy"), fresh=True):
        before = content(place)
        names = {"MODEL": str(model), "BUNDLED": str(MODEL_PATH)}
        assert main([names.get(part, part) for part in shlex.split(command)]) == 2
        assert content(place) == before
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ssd-cache: error: ") and ERRORS[command] in line and "hidden" not in line


@pytest.mark.parametrize(
    ("words", "meant"),
    [("bild x", "build"), ("build --tokeniser x", "--tokenizer"), ("pull --namspace=x", "--namespace")],
)
def test_a_misspelled_command_or_option_is_named_with_the_one_that_was_meant(
    words: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2 and capsys.readouterr().err.endswith(f"did you mean {meant}?\n")


@pytest.mark.parametrize("command", ["inspect merge --deep", "merge --out=out -- --out.bin"])
def test_words_that_are_files_are_not_taken_for_misspelled_options(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_help_and_errors_need_no_package_of_an_extra() -> None:
    """Where only the bare package is installed; the modules of the extras are blocked."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(['jinja2', 'tqdm', 'transformers', 'redis', 'fsspec']))\n"
    run = f"{blocked}from cache_builder.__main__ import main\nsys.exit(main())"

    def ended(words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", run, *words.split()], capture_output=True, text=True, timeout=60)

    shown, refused = ended("--help"), ended(f"build missing.txt {BUILD}")
    assert shown.returncode == 0 and "build a cache directory" in shown.stdout
    assert refused.returncode == 2 and refused.stderr.startswith(
        "ssd-cache: error: a package is missing: pip install 'ssd-serving[builder]' ("
    )


@pytest.mark.parametrize("command", [f"build missing.txt {BUILD}", "merge missing --out out"])
def test_a_mount_point_is_refused_before_any_work(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == Path("out").resolve())
    assert main(shlex.split(command)) == 2
    assert "out is a mount point" in capsys.readouterr().err


IDS = "one list of integers"
BAD_LINES: list[tuple[Any, str]] = [
    ("{broken", "not JSON"),
    ("[1]", "the record must be a JSON object, got list"),
    ("[" * 100_000, "not JSON"),
    ({"question": "x"}, '(found: "question"); supported are "text"'),
    ({"text": 7}, '"text" must be a string, got int'),
    ({"prompt": ["x", "y"], "completion": "y"}, '"prompt" must be a string'),
    ({"messages": [{"role": "robot", "content": "x"}]}, "has role 'robot'"),
    ({"messages": {"a": 1}}, "must be a list"),
    ({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ({"token_ids": [1, -1]}, "within 0..399, got -1..1"),
    ({"token_ids": [400]}, "within 0..399"),
    *(({"token_ids": ids}, IDS) for ids in ([1.5], "abc", [[1], [2, 3]], [True], [1 << 80], None, {"a": 1})),
    *(({"token_ids": [1], "prompt_length": length}, '"prompt_length" must be within 0..1') for length in (2, "x")),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_stops_or_is_counted(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: Any, message: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "good"}\n' + (line if isinstance(line, str) else json.dumps(line)))
    command = ["build", str(path), "--tokenizer", str(model), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "in.jsonl:2" in error and message in error
    assert sorted(child.name for child in tmp_path.iterdir()) == ["in.jsonl"]  # nothing half written
    assert main([*command, "--skip-invalid"]) == 0
    said = capsys.readouterr().out
    assert "1 invalid" in said and "1 sequences" in said
