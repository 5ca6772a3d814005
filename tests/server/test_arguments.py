"""The command line: names of ``vllm serve``, hints, and options from a file."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.command.arguments import Options, build_app, parse_arguments
from ssd.bundled import MODEL_PATH
from ssd.numbers import format_number, parse_number


def parse(*words: str) -> Options:
    return parse_arguments(words, {})


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        parse(*words)
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and message.count("\n") == 1 and message.startswith("ssd-serve: error: ")
    return message


def test_options_mean_what_they_mean_to_vllm() -> None:
    options = parse(
        "some/model",
        "--dtype",
        "half",
        "--max-model-len",
        "32k",
        "--gpu-memory-utilization",
        "0.8",
        "--seed",
        "3",
        "--kv-cache-memory-bytes",
        "4G",
        "--tokenizer",
        "other",
        "--revision",
        "v1",
        "--download-dir",
        "models",
        "--allowed-origins",
        '["https://a", "https://b"]',
        "--allow-credentials",
        "--root-path",
        "/llm/",
        "--tensor-parallel-size",
        "1",
        "--data-parallel-size",
        "1",
        "--trust-remote-code",
        "--enable-chunked-prefill",
        "--tokenizer-mode",
        "auto",
    )
    assert options.model.path == options.model.name == "some/model"
    assert options.model.torch_dtype == "float16"
    assert options.model.hub.arguments() == {"revision": "v1", "cache_dir": "models", "trust_remote_code": True}
    assert options.model.tokenizer_path == "other" and options.model.tokenizer_hub.revision is None
    config = options.engine.config
    assert (config.max_model_len, config.kv_cache_memory_bytes) == (32_000, 4 << 30)
    assert (config.gpu_memory_utilization, options.engine.seed) == (0.8, 3)
    cors = options.cors
    origins = ("https://a", "https://b")
    assert (cors.allowed_origins, cors.allow_credentials, cors.allowed_methods) == (origins, True, ("*",))
    assert options.network.root_path == "/llm"
    assert parse("--dtype", "float").model.torch_dtype == "float32"
    assert parse("--no-speculation").speculation.draft.num_speculative_tokens == 0
    assert parse("--max-model-len", "auto").engine.config.max_model_len is None
    assert parse("--revision", "v1").model.tokenizer_hub.revision == "v1"


def test_the_word_serve_and_the_option_model_are_understood() -> None:
    assert parse("serve", "some/model").model.path == "some/model"
    assert parse("serve").model.path == str(MODEL_PATH)
    assert parse("--model", "some/model").model.name == "some/model"
    assert parse("./serve").model.path == "./serve"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--max-body-byte", "3"), "Did you mean --max-body-bytes?"),
        (("--nothing-like-it-at-all",), "Unknown option: --nothing-like-it-at-all (see"),
        (("nonsense", "model"), "unrecognized argument model"),
        (("a", "--model", "b"), "given twice"),
        (("",), "MODEL is empty"),
        (("--served-model-name", "a", " "), "--served-model-name"),
        (("--kv-cache-memory-bytes", "4Q"), "4GiB"),
        (("--max-model-len", "1.5K5"), "32k"),
        (("--gpu-memory-utilization", "1.5"), "gpu_memory_utilization"),
        (("--allowed-origins", "*", "--allow-credentials"), "list the allowed origins"),
        (("--allowed-origins", "[1]"), "strings"),
        (("--obfuscation", "always", "--per-request-spec-decode-metrics", "summary"), "omit one"),
        (("--allowed-origins", '["a'), "JSON"),
        (("--root-path", "llm"), "must begin with /"),
        (("--ssl-certfile", "pyproject.toml", "--ssl-cert-reqs", "2"), "--ssl-ca-certs"),
        (("--chat-template", "no-such-file"), "--chat-template no-such-file"),
        (("--api-key", ""), "--api-key: key 1 must not be empty"),
        (("--api-key", "--host", "x"), "requires an argument"),
        (("--hf-token", "secret"), "$HF_TOKEN"),
        (("--kv-cache-dtype", "fp8"), "omit the option, or set it to auto"),
        (("--speculative-config", "{}"), "--draft-model"),
        (("--config", "no-such-file"), "No such file"),
        (("--tensor-parallel-size", "2"), "ssd.integrations.vllm"),
        (("--pipeline-parallel-size", "2"), "ssd.integrations.vllm"),
        (("--data-parallel-size", "2"), "ssd.integrations.vllm"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    words: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = complaint(capsys, *words)
    assert hint in message and "secret" not in message


def test_every_option_of_the_help_has_a_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse("--help")
    shown = capsys.readouterr().out
    assert stopped.value.code == 0 and "--tokenizer-mode" not in shown and "--allowed-origins" in shown
    for argument in build_app().assemble_argument_collection(parse_docstring=True):
        assert argument.parameter.help or argument.children or not argument.show, argument.name


SETTINGS: dict[str, Any] = {
    "port": 8001,
    "max_num_seqs": 3,
    "max-model-len": "2K",
    "served-model-name": ["one", "two"],
    "enable-prefix-caching": False,
    "enforce-eager": True,
    "no-speculation": False,
    "warm": ["a", "b"],
    "allowed-origins": ["https://a", "https://b"],
    "chat-template": "{{ messages }}",
    "namespace": "-odd",
}


def check(options: Options) -> None:
    assert (options.network.port, options.engine.config.max_num_seqs) == (8001, 3)
    assert options.engine.config.max_model_len == 2048
    assert options.service.model_names == ("one", "two")
    assert not options.engine.config.enable_prefix_caching and options.engine.config.enforce_eager
    assert options.speculation.draft.num_speculative_tokens == 64
    assert options.cache.warm_directories == (Path("a"), Path("b"))
    assert options.cors.allowed_origins == ("https://a", "https://b")
    assert options.model.chat_template == "{{ messages }}" and options.cache.namespace == "-odd"


def test_a_file_holds_options_by_their_names(tmp_path: Path) -> None:
    files = {"a.yaml": json.dumps(SETTINGS), "a.toml": "\n".join(f"{k} = {json.dumps(v)}" for k, v in SETTINGS.items())}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        options = parse("--config", str(tmp_path / name))
        check(options)
        assert options.model.path == str(MODEL_PATH)


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(json.dumps({**SETTINGS, "model": "filed", "port": 1, "warm": ["c"], "max_num_seqs": 9}))
    words = ("--port", "8001", "--warm", "a", "--warm", "b", "--max-num-seqs=3")
    for model in ((), ("given",), ("--model", "given")):
        options = parse(*words, "--config", str(path), *model)
        check(options)
        assert options.model.path == (model[-1] if model else "filed")
    path.write_text(json.dumps({"model": "filed", "served-model-name": ["one"]}))
    assert parse("--config", str(path), "--served-model-name", "two").service.model_names == ("two",)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("prot: 8001", "did you mean port?"),
        ("port: [", "cannot be read"),
        ("- port", "must map option names to values"),
        ("port: true", "--port: expected a whole number"),
        ("enforce-eager: 7", "enforce-eager"),
        ("port: http", "--port: expected a whole number"),
        ("3: 4", "there is no option '3'"),
    ],
)
def test_a_wrong_file_is_explained(text: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert hint in complaint(capsys, "--config", str(path))


def test_a_file_with_a_key_is_for_its_owner_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("api-key: sesame\n")
    path.chmod(0o600)
    assert parse("--config", str(path)).service.api_keys == ("sesame",) and not caplog.records
    path.chmod(0o644)
    parse("--config", str(path))
    assert "chmod 600" in caplog.text and "sesame" not in caplog.text


# -- numbers as people write them --------------------------------------------------------------------------------------

FACTORS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@given(whole=st.integers(0, 10**6), fraction=st.from_regex(r"[0-9]{0,4}", fullmatch=True), data=st.data())
def test_a_number_is_its_digits_times_its_unit(whole: int, fraction: str, data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from(sorted(FACTORS)))
    exact = Fraction(f"{whole}.{fraction or 0}") * FACTORS[unit]
    text = f"{whole}{f'.{fraction}' if fraction else ''}{unit}"
    if exact.denominator == 1:
        assert parse_number(text) == exact
    else:
        with pytest.raises(ValueError):
            parse_number(text)


@given(st.integers(0, 10**18 - 1) | st.integers(0, 1 << 20).map(lambda count: count << 20))
def test_what_is_spelled_is_read_again(count: int) -> None:
    assert parse_number(format_number(count)) == count
