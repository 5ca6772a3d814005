"""Single tokens as text and bytes, and words as tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ssd.bundled import MODEL_PATH
from ssd.errors import RequestError
from ssd.text.codec import TextCodec, encode_bad_words
from ssd.text.token_text import TokenTexts
from tests.tokenizers_for_tests import byte_level_tokenizer, real_tokenizers, sentencepiece_like_tokenizer

CODECS = {
    "bundled": TextCodec.load(str(MODEL_PATH)),
    "byte level": TextCodec(PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer()), (0,)),
    "sentencepiece": TextCodec(PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like_tokenizer()), (2,)),
}


def assert_joined(codec: TextCodec, text: str) -> None:
    token_ids = codec.encode_completion(text)
    joined = b"".join(map(TokenTexts(codec).bytes_of, token_ids)).decode("utf-8", "replace")
    assert joined in (codec.decode(token_ids), " " + codec.decode(token_ids))  # some decoders strip the first space


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
