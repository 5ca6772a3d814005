"""``ssd-cache explain``, run as a user would."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cache_builder.__main__ import main
from ssd.config import CacheConfig
from ssd.drafting.acceptance_model import AcceptanceModel
from ssd.drafting.protocol import DraftRequest
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.prebuilt import load_prebuilt_directory
from ssd.text.codec import TextCodec
from tests.cache_files import write_cache

SAID = "the cat sat on the mat and looked at the dog"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, codec: TextCodec) -> Path:
    texts = map(codec.encode_completion, (SAID, SAID, "the cat sat on the roof"))
    return write_cache(tmp_path_factory.mktemp("cache") / "warm", texts, fingerprint=codec.fingerprint)


def write(path: Path, content: str) -> str:
    path.write_text(content)
    return str(path)


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shape", ["tree", "chain"])
def test_a_draft_is_shown_with_the_places_its_beginning_stands_at(
    cache: Path, model: Path, codec: TextCodec, tmp_path: Path, shape: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = write(tmp_path / "prompt.txt", "once the cat sat on the")
    text = explained(capsys, str(cache), "--prompt", prompt, "--tokenizer", str(model), "--shape", shape)
    assert (
        "acceptance probabilities are defaults" in text
        and f"draft: a {shape} of" in text
        and "occur 3 times in the cache" in text
    )
    body = explained(capsys, str(cache), "--prompt", prompt, "--tokenizer", str(model), "--shape", shape, "--json")
    found = json.loads(body)
    stop = len(codec.encode_completion("the cat sat on the"))
    mat, roof = (codec.encode_completion(said)[stop:] for said in (SAID, "the cat sat on the roof"))
    assert found["num_places"] == 3 and found["draft"]["token_ids"][0] in (mat[0], roof[0])
    texts = [token for block in blocks_of_all(cache, codec) for token in block]
    for place, goes_on in zip(found["places"], (mat, mat, roof), strict=True):
        assert texts[place["position"] :][: len(place["goes_on"])] == place["goes_on"] == goes_on[:12]
        assert place["before"] == codec.encode_completion("the cat sat on the")[-12:]


def blocks_of_all(cache: Path, codec: TextCodec) -> list[list[int]]:
    return [each.tokens.tolist() for each in load_prebuilt_directory(cache, fingerprint=codec.fingerprint)]


def test_the_draft_is_the_drafters_own_and_learned_bin_is_used(
    codec: TextCodec, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = codec.encode_completion(SAID)
    with CacheManager(CacheConfig(directory=tmp_path), codec.fingerprint, inline=True) as caches:
        caches.get("served").append(said)
    with CacheManager(CacheConfig(directory=tmp_path), codec.fingerprint, inline=True) as caches:
        snapshot, learned = caches.get("served").snapshot(), caches.get("served").learned
        drafter = SuffixDrafter()
        for number in range(30):  # what stands there comes every time
            for length in (6, 9, 12):
                context = np.array(said[:length], np.int32)
                drafter.propose([DraftRequest(str(number), context, 0, snapshot, 8, learned=learned)])
            drafter.finish(str(number))
        drafter.publish()
    ids = write(tmp_path / "ids.json", json.dumps(said[:6]))
    arguments = [str(tmp_path / "served"), "--prompt", ids, "--draft-limit", "4"]
    found = json.loads(explained(capsys, *arguments, "--shape", "chain", "--json"))
    stored = AcceptanceModel.from_bytes((tmp_path / "served/learned.bin").read_bytes())
    assert found["learned_from"] == stored.num_learned > 0
    request = DraftRequest("x", np.array(said[:6], np.int32), 6, snapshot, 4, learned=learned)
    draft = SuffixDrafter(recycling=False).propose([request])[0]
    assert draft.probabilities is not None
    assert found["draft"]["token_ids"] == draft.token_ids.tolist()
    assert found["draft"]["chances"] == pytest.approx(draft.probabilities.tolist(), rel=1e-4)  # kept as float32
    text = explained(capsys, *arguments)
    assert "acceptance probabilities estimated from" in text


def test_prompts_come_as_text_messages_bodies_and_ids(
    cache: Path, model: Path, codec: TextCodec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": "the cat sat"}]
    for content, ids in (
        ({"prompt": "the cat"}, codec.encode_prompt("the cat")),
        ({"messages": messages, "model": "m"}, codec.encode_chat(messages)),
        (messages, codec.encode_chat(messages)),
    ):
        prompt = write(tmp_path / "prompt.json", json.dumps(content))
        output = write(tmp_path / "output.txt", " on")
        arguments = [str(cache), "--prompt", prompt, "--output", output, "--tokenizer", str(model), "--json"]
        found = json.loads(explained(capsys, *arguments))
        assert (found["prompt_tokens"], found["output_tokens"]) == (len(ids), len(codec.encode_completion(" on")))


def test_where_nothing_stands_that_is_said(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, str(cache), "--prompt", write(tmp_path / "ids.json", "[399]"))
    assert "no draft: the last token occurs nowhere else" in text
