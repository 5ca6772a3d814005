"""The bundled model and its draft head: complete, small, load as published ones do, say what they should."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tomllib
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ssd.bundled import HEAD_PATH, MODEL_PATH
from ssd.model.heads.layouts import load_head
from ssd.model.heads.networks import Eagle3Head
from ssd.model.layers.hidden_states import HiddenStateTap
from ssd.model.loading.load_target import load_model

END_OF_TEXT_ID = 0
HELD_OUT_ONE_IN = 24


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_PATH).eval()


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_PATH)


def test_importing_the_path_loads_no_torch() -> None:
    code = "import sys, ssd.bundled; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_packages_are_installed() -> None:
    root = MODEL_PATH.parent.parent.parent
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [
        file.parent.relative_to(root)
        for top in ("ssd", "server", "cache_builder")
        for file in (root / top).rglob("__init__.py")
    ]
    assert sorted(listed) == sorted({".".join(folder.parts) for folder in folders})


def test_what_is_installed_is_small() -> None:
    for directory, most in ((MODEL_PATH, 12_000_000), (HEAD_PATH, 3_000_000)):
        assert sum(file.stat().st_size for file in directory.iterdir() if file.is_file()) <= most


def test_plain_loading_computes_in_float32_and_stores_no_head() -> None:
    assert model().dtype == torch.float32
    assert model().lm_head.weight is model().model.embed_tokens.weight
    assert model().config.max_position_embeddings >= 1024


def test_no_token_is_prepended_and_end_of_text_is_one_token() -> None:
    assert tokenizer()("")["input_ids"] == []
    assert tokenizer()("<|endoftext|>")["input_ids"] == [END_OF_TEXT_ID]
    assert tokenizer().eos_token_id == model().generation_config.eos_token_id == END_OF_TEXT_ID
    assert len(tokenizer()) == model().config.vocab_size


def test_chat_template_renders_what_training_rendered() -> None:
    messages = [
        {"role": role, "content": content}
        for role, content in (
            ("system", "Be brief."),
            ("user", "Write f."),
            ("assistant", "def f(): pass\n"),
            ("user", "  Again. "),
        )
    ]
    rendered = tokenizer().apply_chat_template(messages, tokenize=False)
    assert rendered == ("<|system|>Be brief.<|user|>Write f.<|assistant|>def f(): pass\n<|endoftext|><|user|>  Again. ")
    prompt = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == rendered + "<|assistant|>"


def test_record_lists_every_file_with_its_hash() -> None:
    record = json.loads((MODEL_PATH / "CORPUS.json").read_text())
    paths = [file["path"] for file in record["files"]]
    assert paths == sorted(set(paths))
    assert len(paths) > 400
    for file in record["files"]:
        assert len(bytes.fromhex(file["sha256"])) == 32
        assert not file["path"].startswith("/")
        number = int(hashlib.sha256(file["path"].encode()).hexdigest(), 16)
        assert file["held_out"] == (number % HELD_OUT_ONE_IN == 0)
    assert {file["held_out"] for file in record["files"]} == {True, False}


# -- the draft head that ships with it --


@cache
def target() -> PreTrainedModel:
    return load_model(MODEL_PATH, dtype="float32", device="cpu")


@cache
def head() -> Eagle3Head:
    loaded = load_head(HEAD_PATH, target())
    assert isinstance(loaded, Eagle3Head)
    loaded.config._attn_implementation = "sdpa"
    return loaded


def test_it_reads_three_hidden_states_and_drafts_frequent_tokens() -> None:
    assert head().feature_layers == (2, 4, 6)
    ids = head().draft_to_target
    assert ids is not None and len(ids) == 2048 and bool((ids.diff() > 0).all()) and int(ids[-1]) < 4096


def test_it_agrees_with_the_model_about_as_often_as_when_it_was_trained() -> None:
    lines = [json.loads(line) for line in (HEAD_PATH / "training.jsonl").read_text().splitlines()]
    recorded = next(line for line in lines if "held_out" in line)["held_out"][0]["most_probable"]
    prefixes = torch.tensor([[5, 300, 7, 41], [900, 12, 600, 33], [64, 250, 1000, 77], [2000, 9, 10, 400]])
    texts = target().generate(prefixes, do_sample=False, min_new_tokens=96, max_new_tokens=96)
    with torch.inference_mode(), HiddenStateTap(target(), head().feature_layers).recording() as hidden:
        target()(input_ids=texts, use_cache=False)
    features = head().combine(hidden)[:, :-1]
    positions = torch.arange(features.shape[1])[None]
    with torch.inference_mode():
        logits, _ = head()(texts[:, 1:], features, positions)
    ids = head().draft_to_target
    assert ids is not None
    drafted = ids[logits.argmax(-1)][:, :-1]
    agreement = (drafted == texts[:, 2:])[:, prefixes.shape[1] :].float().mean()
    assert agreement > 0.5 * recorded["accepted_to_depth"][0]
