"""All that a client sees of an answer, to be compared by ``==``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ssd.engine import Engine, FinishReason, Request, RequestOutput
from ssd.model.sampling.sampler import TokenLogprobs


class Answer(NamedTuple):
    """``logprobs`` and ``prompt_logprobs`` : None where none were asked for."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None


def whole(outputs: Sequence[RequestOutput]) -> Answer:
    """What all steps gave a request."""
    first, last = outputs[0], outputs[-1]
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    has_logprobs = any(output.logprobs is not None for output in outputs)
    return Answer(
        tokens_of(outputs),
        "".join(output.text for output in outputs),
        last.finish_reason,
        last.stop_reason,
        [entry for output in outputs for entry in output.logprobs or ()] if has_logprobs else None,
        None if first.prompt_logprobs is None else list(first.prompt_logprobs),
    )


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    """All tokens of a request."""
    return [token for output in outputs for token in output.token_ids]


def finish_all(
    engine: Engine, begun: Sequence[RequestOutput] = (), *, is_checked: bool = True
) -> dict[str, list[RequestOutput]]:
    """The outputs of all requests, those that came before as well; the bookkeeping is checked after every step."""
    outputs: dict[str, list[RequestOutput]] = {}
    for output in begun:
        outputs.setdefault(output.request_id, []).append(output)
    while engine.has_work():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        found_wrong = engine.check() if is_checked else []
        assert not found_wrong, found_wrong
    return outputs


def answers_of(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    """Of each request, all asked at once."""
    for request in requests:
        engine.submit(request)
    outputs = finish_all(engine, is_checked=False)
    return [whole(outputs[request.request_id]) for request in requests]
