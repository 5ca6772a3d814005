"""The bundled model: complete, small, loads as any Hugging Face model, stops by itself."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.training import corpus
from benchmarks.training.corpus import TokenStream
from benchmarks.training.evaluate import loop_share, repeated_tokens
from benchmarks.training.model_format import END_OF_TEXT_ID, Message, render
from benchmarks.training.train import load_optimizers, make_optimizers, take_step, unlikelihood_loss
from ssd.bundled import MODEL_PATH

ODD_TEXTS = [
    "",
    " ",
    "  leading and trailing  ",
    "\t\ttabs\r\nand\rreturns\n\n\n",
    "don 't do n't , really ?",
    "1234567890 0x1F 3.14e-10",
    "naïve „quotes“ 中文 🙂\u200d👩",
    "\x00\x01\x7f\ufffd\ud7ff\U0010ffff",
    "".join(map(chr, range(256))),
]

SMALL = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_PATH).eval()


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_PATH)


def greedy(prompt: str, num_tokens: int) -> list[int]:
    inputs = tokenizer()(prompt, return_tensors="pt", add_special_tokens=False)
    output = model().generate(**inputs, do_sample=False, max_new_tokens=num_tokens)
    new: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return new


def test_importing_the_path_loads_no_torch() -> None:
    code = "import sys, ssd.bundled; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_packages_are_installed() -> None:
    root = MODEL_PATH.parent.parent.parent
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [file.parent.relative_to(root) for top in ("ssd", "server", "cache_builder")
               for file in (root / top).rglob("__init__.py")]  # fmt: skip
    assert sorted(listed) == sorted({".".join(folder.parts) for folder in folders})


def test_everything_together_is_at_most_12_megabytes() -> None:
    files = {file.name: file.stat().st_size for file in MODEL_PATH.iterdir() if file.is_file()}
    assert sum(files.values()) <= 12_000_000, files
    assert {"MODEL_CARD.md", "CORPUS.json", "PYTHON-LICENSE.txt", "NOTICES.txt", "chat_template.jinja"} <= set(files)


def test_plain_loading_computes_in_float32_and_stores_no_head() -> None:
    assert model().dtype == torch.float32
    assert model().lm_head.weight is model().model.embed_tokens.weight
    assert model().config.max_position_embeddings >= 1024


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_decoding_gives_back_the_text(text: str) -> None:
    ids = tokenizer()(text)["input_ids"]
    assert tokenizer().decode(ids) == text


def test_no_token_is_prepended_and_end_of_text_is_one_token() -> None:
    assert tokenizer()("")["input_ids"] == []
    assert tokenizer()("<|endoftext|>")["input_ids"] == [END_OF_TEXT_ID]
    assert tokenizer().eos_token_id == model().generation_config.eos_token_id == END_OF_TEXT_ID
    assert len(tokenizer()) == model().config.vocab_size


def test_chat_template_renders_what_training_rendered() -> None:
    messages = [
        Message("system", "Be brief."),
        Message("user", "Write f."),
        Message("assistant", "def f(): pass\n"),
        Message("user", "  Again. "),
    ]
    as_dicts = [{"role": message.role, "content": message.content} for message in messages]
    rendered = tokenizer().apply_chat_template(as_dicts, tokenize=False)
    assert rendered == render(messages)
    prompt = tokenizer().apply_chat_template(as_dicts, tokenize=False, add_generation_prompt=True)
    assert prompt == rendered + "<|assistant|>"


def test_an_answer_ends_in_end_of_text() -> None:
    question = [{"role": "user", "content": "Write `close`: Close the file."}]
    prompt = tokenizer().apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert greedy(prompt, 200)[-1] == END_OF_TEXT_ID


def test_greedy_text_is_the_same_twice_and_does_not_loop_at_once() -> None:
    first = greedy("class Stack:\n", 64)
    assert first == greedy("class Stack:\n", 64)
    assert loop_share(first) <= 0.3


def test_positions_up_to_the_limit_are_usable() -> None:
    length = model().config.max_position_embeddings
    ids = torch.randint(0, 4096, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.isfinite(model()(input_ids=ids).logits).all()


def test_record_lists_every_file_with_its_hash() -> None:
    record = json.loads((MODEL_PATH / "CORPUS.json").read_text())
    paths = [file["path"] for file in record["files"]]
    assert paths == sorted(set(paths))
    assert len(paths) > 400
    for file in record["files"]:
        assert len(bytes.fromhex(file["sha256"])) == 32
        assert not file["path"].startswith("/")
        assert file["held_out"] == corpus.is_held_out(file["path"])
    assert {file["held_out"] for file in record["files"]} == {True, False}


def test_conversations_are_a_function_of_the_file() -> None:
    functions = "".join(f'def f{i}(a):\n    """Return {i}."""\n    return {i}\n\n' for i in range(40))
    file = corpus.SourceFile("x.py", functions, held_out=False)
    talks = list(corpus.conversations(file))
    assert talks == list(corpus.conversations(file))
    assert talks
    for talk in talks:
        roles = [message.role for message in talk if message.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert list(corpus.conversations(corpus.SourceFile("y.py", "def f(:\n", held_out=False))) == []


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([7], [0]),
        ([7] * 7, [0] * 7),
        ([7] * 8, [0] + [1] * 7),
        ([1, 2, 3, 4, 1, 2, 3, 4], [0] * 4 + [1] * 4),
        ([9, 1, 2, 3, 4, 1, 2, 3, 4, 1, 5], [0] * 5 + [1] * 5 + [0]),
        ([1, 2, 3, 4, 1, 2, 3, 5], [0] * 8),
        (list(range(33)) * 2, [0] * 66),
    ],
)
def test_a_loop_is_two_whole_copies_and_eight_tokens(tokens: list[int], expected: list[int]) -> None:
    assert repeated_tokens(tokens).tolist() == [bool(value) for value in expected]


def test_token_stream_covers_an_epoch_once_and_depends_on_the_seed() -> None:
    documents = [np.arange(start, start + 10) for start in range(0, 100, 10)]
    stream = TokenStream(documents, seed=0, num_tokens=8)
    inputs = torch.cat([stream.batch(step, 4)[0].flatten() for step in range(12)])
    assert len(set(inputs.tolist())) == 96
    inputs, targets = stream.batch(13, 8)
    assert torch.equal(inputs[0, 1:], targets[0, :-1])
    assert torch.equal(stream.batch(13, 8)[0], TokenStream(documents, seed=0, num_tokens=8).batch(13, 8)[0])
    assert not torch.equal(inputs, TokenStream(documents, seed=1, num_tokens=8).batch(13, 8)[0])


def test_one_step_moves_matrices_by_muon_and_the_rest_by_adamw() -> None:
    torch.manual_seed(0)
    trained = LlamaForCausalLM(LlamaConfig(**SMALL))
    before = {name: weight.detach().clone() for name, weight in trained.named_parameters()}
    trained(input_ids=torch.arange(12)[None], labels=torch.arange(12)[None]).loss.backward()
    optimizers = make_optimizers(trained)
    take_step(optimizers, 0.01)
    for name, weight in trained.named_parameters():
        moved = weight.detach() - before[name]
        if weight.ndim == 2 and "embed" not in name:
            values = torch.linalg.svdvals(moved / (0.01 * 0.2 * max(weight.shape) ** 0.5))
            assert values.min() > 0.5 and values.max() < 1.4
        else:
            assert 0.9 * 0.01 < moved.abs().max() < 1.1 * 0.01
    again = make_optimizers(trained)
    load_optimizers(again, {"optimizers": [each.state_dict() for each in optimizers]})
    assert [len(each.state) for each in again] == [len(each.state) for each in optimizers] == [7, 4]


def test_unlikelihood_is_zero_without_loops_and_lowers_looped_tokens() -> None:
    plain = torch.arange(20)[None]
    assert unlikelihood_loss(model(), plain, 4)[0].item() == 0
    looped = torch.tensor([[5, 6, 7, 8] * 6])
    loss, share = unlikelihood_loss(model(), looped, 4)
    assert share == pytest.approx(0.8)
    assert loss.requires_grad
