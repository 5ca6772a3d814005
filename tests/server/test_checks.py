"""What cannot work is said before anything is loaded."""

from __future__ import annotations

import json
import logging
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.command.arguments import parse_arguments
from server.command.checks import check_before_loading, check_own_templates
from ssd.bundled import MODEL_PATH
from ssd.errors import ConfigError, ModelError, SSDError
from ssd.retrieval.prebuilt import PrebuiltWriter
from ssd.text.codec import TextCodec
from ssd.text.load_tokenizer import find_generation_config
from tests.redis_server import RedisServer
from tests.redis_server import redis_server as redis_server  # a fixture


def check(*words: str) -> None:
    check_before_loading(parse_arguments(words, {}))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model that may be broken."""
    copy = tmp_path / "model"
    copy.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_PATH / name, copy)
    return copy


def test_a_servers_whole_cache_directory_given_as_warm_up_is_answered_with_the_caches_in_it(tmp_path: Path) -> None:
    for name in ("support", "default"):
        with PrebuiltWriter(tmp_path / name, fingerprint="0" * 32) as writer:
            writer.append([1, 2, 3])
    with pytest.raises(ConfigError, match=r"contains no cache .*: it has caches in default, support$"):
        check("--warm", str(tmp_path))


def test_what_can_work_passes(tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with PrebuiltWriter(tmp_path / "warm", fingerprint="0" * 32) as writer:
        writer.append([1, 2, 3])
    check()
    check(str(model), "--max-model-len", "2048", "--warm", str(tmp_path / "warm"), "--cache-dir", str(tmp_path / "new"))
    check(
        str(model),
        "--chat-template",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% continue %}{% endfor %}",
    )
    assert not caplog.records


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--namespace", "../other"), "namespace"),
        (("--redis", "nowhere"), "is not a Redis URL"),
        (("--warm", "tests"), "ssd-cache build"),
        (("--warm", "no-such-directory"), "no-such-directory"),
        (("--cache-tokens", "1000t"), "--cache-tokens"),
        (("--max-model-len", "1m"), "--max-model-len 1000000 exceeds the model's context of 2048"),
        (("--draft-model", "./no-such-directory"), "no-such-directory"),
        (("--draft-head", "./no-such-directory"), "no-such-directory"),
        (("--draft-head", "tests"), "has no config.json"),
        (("--chat-template", "{% if %}"), "--chat-template is not a valid template: line 1"),
        (("tests",), "config.json"),
        (("pyproject.toml",), "is a file"),
        (("--cache-dir", "/proc/cache"), "--cache-dir /proc/cache cannot be written (/proc: "),
        (("--cache-dir", "pyproject.toml/cache"), "cannot be written"),
        (("nonsense model",), "neither a local directory nor a model id"),
        (("a/b/c",), "there is no directory a/b/c"),
    ],
)
def test_what_cannot_work_is_refused(words: tuple[str, ...], hint: str, no_hub: None) -> None:
    with pytest.raises(SSDError, match=hint.replace("(", r"\(")) as error:
        check(*words)
    assert isinstance(error.value, (ConfigError, ModelError)) and "\n" not in str(error.value)


@pytest.mark.skipif(any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")), reason="a GPU")
def test_a_device_that_is_not_there_is_missed_at_once() -> None:
    with pytest.raises(ModelError, match="use --device cpu"):
        check("--device", "cuda")


def test_files_of_a_model_that_are_missing_are_named(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}})
    )
    with pytest.raises(ModelError, match=r"lacks 1 of the 2 files .* model-1.safetensors"):
        check(str(model))
    (model / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="cannot be read"):
        check(str(model))
    (model / "model.safetensors.index.json").unlink()
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        check(str(model))
    (model / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        check(str(model))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(model: Path, name: str) -> None:
    (model / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0f6ac8\nsize 42\n")
    with pytest.raises(ModelError, match=rf"{name} is a Git LFS pointer .* run `git lfs pull`"):
        check(str(model))
    if name == "tokenizer.json":
        with pytest.raises(ModelError, match="Git LFS pointer"):
            check("--tokenizer", str(model / name))


def test_directories_of_other_kinds_are_named(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ModelError, match=r"has no config\.json: it has GGUF files, which ssd-serve cannot load\. "):
        check(str(tmp_path))
    with pytest.raises(ModelError, match=r"\.gguf is a GGUF file, which ssd-serve cannot load: "):
        check(str(tmp_path / "model-Q4_K_M.gguf"))
    for adapter, text in (
        ({"base_model_name_or_path": "owner/base"}, " of owner/base. Serve that model"),
        ([], "\\. "),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
        with pytest.raises(ModelError, match=f"it is a LoRA adapter{text}.*--lora-modules"):
            check(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"architectures": ["BertModel"], "model_type": "bert"}, "an encoder or a classifier"),
        ({"architectures": ["XLMRobertaForSequenceClassification"]}, "an encoder or a classifier"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "an encoder or a classifier"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"architectures": ["BertLMHeadModel"], "is_decoder": True}, None),
        ({"architectures": ["LlavaForConditionalGeneration"]}, None),
        ({"architectures": None}, None),
    ],
)
def test_models_that_continue_no_text_are_named(model: Path, settings: dict[str, object], kind: str | None) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **settings}))
    if kind is None:
        check(str(model))
        return
    with pytest.raises(ModelError, match=f"{kind} .*, which cannot generate text"):
        check(str(model))


def test_a_models_own_template_is_compiled_at_the_start(model: Path) -> None:
    check_own_templates(TextCodec.load(str(model)))
    (model / "chat_template.jinja").write_text("{{ bos_token }}\n{% if x %}")
    with pytest.raises(ModelError, match=r"the model's chat template, line 2: .*Repair its chat_template\.jinja"):
        check_own_templates(TextCodec.load(str(model)))


def test_the_cache_of_a_server_that_does_not_draft_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    check("--no-speculation", "--redis", "redis://127.0.0.1:1", "--draft-model", str(MODEL_PATH))
    assert "these options have no effect: --redis and --draft-model" in caplog.text


def test_a_redis_that_may_come_later_is_a_warning(caplog: pytest.LogCaptureFixture, redis_server: RedisServer) -> None:
    with caplog.at_level(logging.INFO):
        check("--redis", "redis://:secret@127.0.0.1:1/0")
        assert "127.0.0.1:1/0 does not answer" in caplog.text and "secret" not in caplog.text
        caplog.clear()
        check("--redis", redis_server.url)
        assert "answers" in caplog.text


# The hub


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine where the hub takes no connection."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield


def test_an_id_without_a_network_is_refused_without_a_wait(no_hub: None, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match=r"nor in the local hub cache, and .* cannot be reached"):
        check("owner/name")
    assert not caplog.records


def test_what_is_in_the_cache_is_used_without_a_network(
    no_hub: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    shutil.copy(MODEL_PATH / "config.json", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    check("owner/name", "--max-model-len", "128", "--download-dir", str(tmp_path / "hub"))
    assert "cannot be reached" in caplog.text
    options = parse_arguments(["owner/name", "--download-dir", str(tmp_path / "hub")], {}).model
    assert find_generation_config(options.path, options.hub) is None
