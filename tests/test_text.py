"""Text to ids and back."""

from __future__ import annotations

import json
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ssd.bundled import MODEL_PATH
from ssd.errors import ModelError, RequestError
from ssd.text.codec import TextCodec, TokenTexts, encode_bad_words
from ssd.text.detokenizer import TextStream
from tests.reference.text import decoded_text, stopped_text
from tests.tokenizers_for_tests import (
    byte_level_tokenizer,
    real_tokenizers,
    sentencepiece_like_tokenizer,
    write_model_directory,
)

USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    path = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece_like_tokenizer().save(str(path / "tokenizer.json"))
    return TextCodec.load(str(path))


# Loading


def test_a_lone_tokenizer_file_finds_its_end_of_text(sentencepiece: TextCodec) -> None:
    assert (sentencepiece.eos_token_ids, sentencepiece.bos_token_id) == ((2,), 1)
    assert not sentencepiece.has_chat_template


def test_end_tokens_are_those_of_config_json_where_no_generation_config_names_any(tmp_path: Path) -> None:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))

    def ends(**files: object) -> tuple[int, ...]:
        for name in ("config", "generation_config"):
            (tmp_path / f"{name}.json").unlink(missing_ok=True)
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return TextCodec.load(str(tmp_path / "tokenizer.json")).eos_token_ids

    assert ends() == ()
    assert ends(config={"eos_token_id": 5}) == (5,)
    assert ends(config={"eos_token_id": [5, 6]}, generation_config={"temperature": 0.7}) == (5, 6)
    assert ends(config={"eos_token_id": [5, 6]}, generation_config={"eos_token_id": 7}) == (7,)
    assert ends(config={"text_config": {"eos_token_id": 8}}) == (8,)
    assert ends(config={"eos_token_id": None}) == ()


def test_the_fingerprint_says_what_ids_mean(codec: TextCodec, model: Path, tmp_path: Path) -> None:
    assert len(codec.fingerprint) == 32
    assert set(codec.fingerprint) <= set("0123456789abcdef")
    assert TextCodec.load(str(model / "tokenizer.json")).fingerprint == codec.fingerprint
    other = TextCodec.load(str(write_model_directory(tmp_path / "other", num_tokens=401)))
    assert other.fingerprint != codec.fingerprint


def test_what_cannot_be_loaded_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="contains no tokenizer"):
        TextCodec.load(str(tmp_path))
    with pytest.raises(ModelError, match="neither a local directory nor a model id"):
        TextCodec.load(str(tmp_path / "missing" / "model"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded"):
        TextCodec.load(str(tmp_path))
    write_model_directory(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        TextCodec.load(str(tmp_path / "model"))


# Encoding


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "empty"),
        ("hello", "list of messages"),
        (["hello"], r"messages\[0\] must be an object"),
        ([USER, {"role": "robot", "content": "x"}], r"messages\[1\] has role 'robot'"),
        ([{"content": "x"}], "has role None"),
        ([{"role": ["user"], "content": "x"}], "has role"),
        ([{"role": "user"}], "has no content"),
        ([{"role": "user", "content": 7}], "content of type int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] is not a text part.*'image_url'"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is not a text part"),
        ([{"role": "assistant", "content": None, "tool_calls": "x"}], "tool_calls must be a list"),
    ],
)
def test_messages_that_cannot_be_used(codec: TextCodec, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        codec.encode_chat(messages)
    assert caught.value.param == "messages"


def test_other_reasons_to_refuse_a_conversation(codec: TextCodec, sentencepiece: TextCodec) -> None:
    with pytest.raises(RequestError, match="no chat template") as caught:
        sentencepiece.encode_chat([USER])
    assert caught.value.param == "messages"
    for template in ("{% if %}", "{{ 1 / 0 }}", "{{ undefined.attribute }}"):
        with pytest.raises(RequestError) as caught:
            codec.encode_chat([USER], chat_template=template)
        assert caught.value.param == "chat_template"
    refusing = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer())
    refusing.chat_template = "{{ raise_exception('not ' ~ messages[0].content) }}"
    with pytest.raises(RequestError, match=r"refuses these messages: not a <\|end\|>$") as caught:
        TextCodec(refusing, ()).encode_chat([{"role": "user", "content": "a <|end|>"}])
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="tokenize") as caught:
        codec.encode_chat([USER], template_kwargs={"tokenize": True})
    assert caught.value.param == "chat_template_kwargs"


def test_templates_that_want_arguments_as_text_get_them(codec: TextCodec) -> None:
    call: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": '{"x": "é <|end|>"}'}}
    messages: list[dict[str, Any]] = [USER, {"role": "assistant", "tool_calls": [call]}]
    template = "{{ messages[0].content + messages[1].tool_calls[0].function.arguments }}"
    assert codec.decode(codec.encode_chat(messages, chat_template=template)) == 'hello{"x": "é <|end|>"}'
    with pytest.raises(RequestError, match="refuses"):
        codec.encode_chat(messages, chat_template="{{ 1 / 0 }}")


_WRONG = "{{ raise_exception('no') }}{% endif %}"
_COUNTED = "m.role == 'tool' or m.tool_calls or (m.role == 'system' and loop.first)"
REFUSALS = {
    "none": "",
    "nothing, but the first system message alone is written": (  # gpt-oss
        "{% if m.role in ['system', 'developer'] and not loop.first %}{% continue %}{% endif %}"
    ),
    "developers": "{% if m.role == 'developer' %}" + _WRONG,
    "later system messages": "{% if m.role == 'system' and not loop.first %}" + _WRONG,  # Qwen 3.5
    "roles that do not alternate, system messages": (  # Gemma 2
        "{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}" + _WRONG
    ),
    "roles that do not alternate, beside calls and results": (  # Mistral 7B v0.3
        "{% if not ("
        + _COUNTED
        + ") %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
        + _WRONG
        + "{% set ns.n = ns.n + 1 %}{% endif %}"
    ),
}
ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}


def said(refusal: str, conversation: str) -> str:
    """What becomes of messages, one a letter, where a template refuses some. ``c`` : an assistant calls a function."""
    call = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"x": ""}'}}]}
    messages = [
        {"role": ROLES[letter], "content": f"{letter}{number}", **(call if letter == "c" else {})}
        for number, letter in enumerate(conversation)
    ]
    calls = "{% for c in m.tool_calls %}{{ c.function.arguments.values() | join }}{% endfor %}"
    each = REFUSALS[refusal] + "[{{ m.role[0] }} {{ m.content }}" + calls + "]"
    template = "{% set ns = namespace(n=0) %}{% for m in messages %}" + each + "{% endfor %}"
    codec = CODECS["byte level"]
    return codec.decode(codec.encode_chat(messages, chat_template=template)).replace("\n\n", "+")


@pytest.mark.parametrize(
    ("refusal", "conversation", "expected"),
    [
        ("none", "sduuasu", "[s s0][s d1][u u2][u u3][a a4][s s5][u u6]"),
        ("developers", "duau", "[s d0][u u1][a a2][u u3]"),
        ("nothing, but the first system message alone is written", "sduasu", "[s s0+d1][u u2][a a3][u s4][u u5]"),
        ("later system messages", "sduuasu", "[s s0+d1][u u2][u u3][a a4][u s5][u u6]"),
        ("roles that do not alternate, system messages", "sduuasuaa", "[u s0+d1+u2+u3][a a4][u s5+u6][a a7+a8]"),
        (
            "roles that do not alternate, beside calls and results",
            "sduuctuau",
            "[s s0+d1][u u2+u3][a c4][t t5+u6][a a7][u u8]",
        ),
        (
            "roles that do not alternate, beside calls and results",
            "suucttau",
            "[s s0][u u1+u2][a c3][t t4][t t5][a a6][u u7]",
        ),
    ],
)
def test_what_a_template_refuses_is_said_in_other_messages(refusal: str, conversation: str, expected: str) -> None:
    assert said(refusal, conversation) == expected


@given(
    st.sampled_from(sorted(REFUSALS)),
    st.from_regex(r"(s|sd)?u{1,2}(c(t|tt|tu|ts)|a(u|uu|su)){0,5}", fullmatch=True),
)
def test_a_longer_conversation_begins_as_it_did(refusal: str, conversation: str) -> None:
    assume("alternate, system" not in refusal or "c" not in conversation)  # it has no place for results
    whole = said(refusal, conversation)
    for end in [number for number, letter in enumerate(conversation) if letter in "ac"]:
        assert whole.startswith(said(refusal, conversation[:end]))


def test_half_a_surrogate_pair_is_no_character(codec: TextCodec) -> None:
    assert codec.decode(codec.encode_completion("a\ud800b")) == "a\ufffdb"


def test_threads_may_encode_and_decode_at_once(codec: TextCodec) -> None:
    text = "some words to encode, again and again. " * 20
    expected, failures = codec.encode_prompt(text), []

    def work() -> None:
        try:
            for _ in range(30):
                assert codec.encode_prompt(text) == expected
                codec.decode(expected)
                codec.encode_chat([USER])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# Streaming

load_once = cache(TextCodec.load)


def streamed(codec: TextCodec, token_ids: list[int], **options: Any) -> tuple[str, str | None]:
    """All that a stream returns, token by token or several at once."""
    stream = TextStream(codec, **options)
    text = "".join([stream.push_token(token_id) for token_id in token_ids]) + stream.finish()
    for size in (2, 3, 7):
        together = TextStream(codec, **options)
        pieces = [together.push(token_ids[at : at + size]) for at in range(0, len(token_ids), size)]
        assert ("".join(pieces) + together.finish(), together.stop_hit) == (text, stream.stop_hit)
    return text, stream.stop_hit


@given(st.data(), st.booleans())
def test_text_is_that_of_transformers(codec: TextCodec, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, codec.vocab_size + 3), max_size=40))
    assert codec._rust_decode is not None
    assert codec.decode(ids, skip_special_tokens=skip) == theirs(codec, ids, skip)
    assert codec.decode(tuple(ids[:1])) == theirs(codec, ids[:1], False)


def theirs(codec: TextCodec, ids: list[int], skip: bool) -> str:
    text: str = codec._tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    return text


def test_a_tokenizer_with_a_decoder_of_its_own_keeps_it(codec: TextCodec) -> None:
    class Shouting(type(codec._tokenizer)):  # type: ignore[misc]
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return super()._decode(*args, **kwargs).upper()

    tokenizer = Shouting(tokenizer_object=codec._tokenizer.backend_tokenizer)
    ids = codec.encode_completion("word")
    assert TextCodec(tokenizer, ()).decode(ids) == "WORD"


@given(st.data())
def test_pieces_are_together_the_decoded_text(codec: TextCodec, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, codec.vocab_size + 3), max_size=60))
    assert streamed(codec, ids)[0] == decoded_text(codec, ids)


@given(st.text("ab cd\n你😀é", max_size=40), st.lists(st.integers(0, 268), max_size=20))
def test_sentencepiece_keeps_its_spaces(sentencepiece: TextCodec, text: str, ids: list[int]) -> None:
    encoded = sentencepiece.encode_completion(text)
    assert streamed(sentencepiece, encoded)[0] == decoded_text(sentencepiece, encoded) == text
    whole = decoded_text(sentencepiece, encoded + ids)
    if "\ufffd" not in whole:
        assert streamed(sentencepiece, encoded + ids)[0] == whole


@given(
    st.text("abc ", max_size=30),
    st.lists(st.text("abc ", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_the_text_ends_at_the_first_stop_string(
    codec: TextCodec, text: str, stop: list[str], include_stop: bool
) -> None:
    ids = codec.encode_completion(text)
    assert streamed(codec, ids, stop=tuple(stop), include_stop=include_stop) == stopped_text(
        text, tuple(stop), include_stop
    )


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_like_tokenizer])
@given(st.lists(st.sampled_from(["", "hole", "a", "space", "half"]), max_size=40))
def test_tokens_without_text_are_not_kept(make: Any, kinds: list[str]) -> None:
    codec, ids_of = with_hole(make)
    ids = [token_id for kind in kinds for token_id in ids_of[kind]]
    text = decoded_text(codec, ids)
    if "\ufffd" not in text or make is byte_level_tokenizer:
        assert streamed(codec, ids)[0] == text
    stream = TextStream(codec)
    for token_id in ids + ids_of["hole"] * 20 + ids_of[""] * 20:
        stream.push_token(token_id)
    assert len(stream._window) < 20


@cache
def with_hole(make: Any) -> tuple[TextCodec, dict[str, list[int]]]:
    """A tokenizer with ids that have no token and one whose token is empty."""
    content = json.loads(make().to_str())
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary.values())
    vocabulary[""] = last + 2
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content))), ())
    space, letter, rocket = (codec.encode_completion(text) for text in (" ", "a", "\U0001f680"))
    return codec, {"": [last + 2], "hole": [last + 1], "space": space[:1], "a": letter[-1:], "half": rocket[-4:-2]}


@pytest.mark.parametrize("path", real_tokenizers(), ids=lambda path: path.name)
@settings(max_examples=15)
@given(data=st.data())
def test_real_tokenizers_stream_what_they_decode(path: Path, data: st.DataObject) -> None:
    codec = load_once(str(path))
    text = data.draw(st.text(max_size=60))
    ids = codec.encode_completion(text)
    assert streamed(codec, ids)[0] == decoded_text(codec, ids)
    ids = data.draw(st.lists(st.integers(0, codec.vocab_size - 1), max_size=40))
    assert codec.decode(ids) == theirs(codec, ids, False)
    whole = decoded_text(codec, ids)
    if "\ufffd" not in whole:
        assert streamed(codec, ids)[0] == whole


# -- single tokens ---------------------------------------------------------------------------------------------------

CODECS = {
    "bundled": TextCodec.load(str(MODEL_PATH)),
    "byte level": TextCodec(PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer()), (0,)),
    "sentencepiece": TextCodec(PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like_tokenizer()), (2,)),
}


def assert_joined(codec: TextCodec, text: str) -> None:
    token_ids = codec.encode_completion(text)
    joined = b"".join(map(TokenTexts(codec).bytes_of, token_ids)).decode("utf-8", "replace")
    assert joined in (codec.decode(token_ids), " " + codec.decode(token_ids))  # some decoders strip the first space


@given(st.sampled_from(sorted(CODECS)), st.text("ab c\n\u00e9", min_size=1, max_size=12), st.data())
def test_a_text_that_goes_on_begins_with_its_space(name: str, text: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    token_ids = codec.encode_completion(text)
    cut = data.draw(st.integers(1, len(token_ids)))
    head, whole = codec.decode(token_ids[:cut]), codec.decode(token_ids)
    assume(not head.endswith("\ufffd"))
    stream = TextStream(codec, before=token_ids[:cut])
    assert head + "".join([stream.push_token(each) for each in token_ids[cut:]]) + stream.finish() == whole
    together = TextStream(codec, before=token_ids[:cut])
    assert head + together.push(token_ids[cut:]) + together.finish() == whole


@given(st.sampled_from(sorted(CODECS)), st.text(max_size=12) | st.text("ab c\n\u00e9\U0001f600", max_size=12))
def test_tokens_joined_are_the_text(name: str, text: str) -> None:
    assert_joined(CODECS[name], text)


def test_tokens_joined_are_the_text_with_real_tokenizers() -> None:
    for path in real_tokenizers():
        assert_joined(TextCodec.load(str(path)), "def caf\u00e9(x):\n    return 'na\u00efve \U0001f600'  # 10%")


def test_special_tokens_and_ids_without_a_token() -> None:
    texts = TokenTexts(CODECS["byte level"])
    assert (texts.text_of(0), texts.text_of(1)) == ("<|end|>", "<|begin|>")
    assert texts.bytes_of(10**6) == b"" and texts.text_of(-1) == ""
    half = CODECS["byte level"].encode_completion("\U0001f995")[0]
    assert texts.text_of(half) == "\ufffd"
    assert "\U0001f995".encode().startswith(texts.bytes_of(half))


def test_bad_words_are_spelled_alone_and_after_a_space() -> None:
    codec = CODECS["bundled"]
    found = encode_bad_words(codec, ["return", " return", "zqxj"])
    assert tuple(codec.encode_completion("return")) in found
    assert tuple(codec.encode_completion(" return")) in found
    assert len(set(found)) == len(found)
    with pytest.raises(RequestError, match="bad_words"):
        encode_bad_words(codec, [""])
