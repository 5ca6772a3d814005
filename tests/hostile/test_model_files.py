"""Files of models that lie about sizes: one line at the start, and no memory is taken for what they say."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssd.bundled import MODEL_PATH
from ssd.errors import ModelError
from ssd.model.loading.load_target import load_model
from ssd.text.codec import TextCodec
from tests.hostile.test_grammars import resident_mb

WEIGHTS = (MODEL_PATH / "model.safetensors").read_bytes()
HEADER_SIZE = struct.unpack("<Q", WEIGHTS[:8])[0]
HEADER = json.loads(WEIGHTS[8 : 8 + HEADER_SIZE])
TENSOR = next(name for name in HEADER if name != "__metadata__")


def replaced(content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}] * 100 + [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<x>": {"id": "<x>", "ids": [1] * 1000, "tokens": ["<x>"] * 1000}},
}
NESTED = json.dumps({"pre_tokenizer": 0}).replace("0", '{"type":"Sequence","pretokenizers":[' * 10**5)
BOMBS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a text 10^8 times as long": (
        lambda t: t.update(normalizer={"type": "Sequence", "normalizers": [replaced("aa" * 50)] * 4}),
        "normalizer",
    ),
    "a megabyte for a letter": (lambda t: t.update(normalizer=replaced("b" * 10**6)), "normalizer"),
    "10^5 tokens around a text": (lambda t: t.update(post_processor=TEMPLATE), "post_processor"),
    "200,000 special tokens": (
        lambda t: t["added_tokens"].extend(
            {**t["added_tokens"][0], "id": 5000 + i, "content": f"<|z{i}|>"} for i in range(200_000)
        ),
        "special tokens, but at most",
    ),
    "merges of what is no token": (lambda t: t["model"].update(merges=[["aaaaaaaa", "bbbb"]] * 10**5), "vocabulary"),
    "deep nesting": (lambda t: NESTED, "recursion"),
}


@pytest.mark.parametrize(("change", "message"), BOMBS.values(), ids=BOMBS)
def test_a_tokenizer_that_would_take_all_memory_is_refused(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    shutil.copy(MODEL_PATH / "tokenizer_config.json", tmp_path)
    tokenizer = json.loads((MODEL_PATH / "tokenizer.json").read_text())
    text = change(tokenizer)
    (tmp_path / "tokenizer.json").write_text(text if isinstance(text, str) else json.dumps(tokenizer))
    before = resident_mb()
    with pytest.raises(ModelError, match=message) as error:
        TextCodec.load(str(tmp_path))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    assert resident_mb() - before < 800


def header(**changes: Any) -> bytes:
    content = json.dumps({**HEADER, TENSOR: {**HEADER[TENSOR], **changes}}).encode()
    return struct.pack("<Q", len(content)) + content + WEIGHTS[8 + HEADER_SIZE :]


LIES = {
    "a header of 2^63 bytes": struct.pack("<Q", 1 << 63) + WEIGHTS[8:],
    "a header of 2^64 - 1": struct.pack("<Q", (1 << 64) - 1) + WEIGHTS[8:],
    "a header beyond the file": struct.pack("<Q", 99_000_000) + WEIGHTS[8:],
    "no header": struct.pack("<Q", 0) + WEIGHTS[8:],
    "a few bytes": WEIGHTS[:5],
    "nothing": b"",
    "half a file": WEIGHTS[: len(WEIGHTS) // 2],
    "a shape of 2^62": header(shape=[1 << 62]),
    "a shape of 2^124": header(shape=[1 << 62, 1 << 62]),
    "a negative shape": header(shape=[-1, 5]),
    "offsets beyond the file": header(data_offsets=[0, 1 << 63]),
    "offsets that overlap": header(data_offsets=[1, HEADER[TENSOR]["data_offsets"][1] + 1]),
    "offsets backwards": header(data_offsets=[100, 0]),
    "an unknown type": header(dtype="X9"),
    "lists within lists": struct.pack("<Q", 10**6) + b"[" * 10**6,
}


@pytest.mark.parametrize("content", LIES.values(), ids=LIES)
def test_weights_whose_header_lies_are_refused(content: bytes, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        shutil.copy(MODEL_PATH / name, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    before = resident_mb()
    with pytest.raises(ModelError, match=r"cannot load model .*[^.]\. Give a directory") as error:
        load_model(str(tmp_path))
    assert "\n" not in str(error.value) and len(str(error.value)) < 700
    assert resident_mb() - before < 200
