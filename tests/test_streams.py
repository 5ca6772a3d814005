"""Streams of token ids: what is cut off a prompt, and what a recorded request had been given."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.streams import cut, made_stream, recorded_stream
from benchmarks.workloads import NO_REPEATS
from ssd.bundled import MODEL_PATH
from ssd.errors import ConfigError
from ssd.text.codec import TextCodec


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.load(str(MODEL_PATH))


class Marked:
    """A codec that writes a mark of the beginning, and one token a character."""

    bos_token_id = 2

    def encode_prompt(self, text: str) -> list[int]:
        return [2, *map(ord, text)]


def test_a_cut_prompt_keeps_its_end_and_the_mark_of_its_beginning(codec: TextCodec) -> None:
    assert cut(Marked(), "abcdef", 4) == [2, *map(ord, "def")]  # type: ignore[arg-type]
    assert cut(Marked(), "abc", 4) == [2, *map(ord, "abc")]  # type: ignore[arg-type]
    whole = codec.encode_prompt("import os\n\n\ndef walk(top):\n    for name in os.listdir(top):\n")
    assert whole[0] != codec.bos_token_id
    assert cut(codec, codec.decode(whole), 6) == whole[-6:]


def test_a_recorded_prompt_holds_what_earlier_turns_said(codec: TextCodec, tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl.gz"
    turns = (("a", "x = 1\n", "y = 2\n", False), ("a", "z = 3\n", "", True), ("b", "w = 4\n", "", False))
    with gzip.open(path, "wt") as file:
        for session, prompt, output, adds in turns:
            record = {"session": session, "prompt": prompt, "output": output, "prompt_is_delta": adds}
            file.write(json.dumps(record) + "\n")
    said = recorded_stream(str(path), codec, 3)
    assert [codec.decode(prompt) for prompt in said.prompts] == ["x = 1\n", "x = 1\ny = 2\nz = 3\n", "w = 4\n"]
    assert len(recorded_stream(str(path), codec, 2).prompts) == 2
    with pytest.raises(ConfigError, match="no trace"):
        recorded_stream("none such", codec, 3)


def test_a_made_stream_without_repeats_has_no_prompt_twice(codec: TextCodec) -> None:
    prompts = made_stream(NO_REPEATS, codec, 60, seed=0, most_tokens=100).prompts
    assert len({tuple(prompt) for prompt in prompts}) == 60
    assert max(map(len, prompts)) <= 100
