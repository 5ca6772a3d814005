"""From a request to the sequence the engine works on: checked first, so that what is queued can be served."""

from __future__ import annotations

from collections.abc import Collection

from ssd.config import MAX_COUPLED_STREAMS, MAX_SPECULATIVE_TOKENS
from ssd.drafting.sequence_noise import SequenceNoise
from ssd.engine.request import Request
from ssd.engine.sequence import Sequence
from ssd.errors import ContextTooLong, RequestError, shown
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.namespace import HeldNamespace
from ssd.text.codec import TextCodec
from ssd.text.grammar import GrammarCompiler, GrammarState
from ssd.text.stream import TextStream

_MOST_PRIORITY = 100


def open_sequence(
    request: Request,
    *,
    codec: TextCodec | None,
    grammars: GrammarCompiler | None,
    caches: CacheSet | None,
    vocab_size: int,
    adapters: Collection[str],
    max_length: int,
    eos_token_ids: tuple[int, ...],
    noise: SequenceNoise,
    takes_priority: bool,
) -> Sequence:
    """The sequence of a request, before its first step.

    Raises RequestError, which names the field and says what to do, where it cannot be served.
    """
    if request.adapter is not None and request.adapter not in adapters:
        raise RequestError(f"there is no adapter {shown(request.adapter)} here", param="model")
    _check(
        request,
        vocab_size=vocab_size,
        max_model_len=max_length,
        has_tokenizer=codec is not None,
        takes_priority=takes_priority,
    )
    sampling = request.sampling
    stream = None if codec is None else TextStream.following(codec, sampling)
    return Sequence(
        request,
        max_length=max_length,
        eos_token_ids=eos_token_ids,
        stream=stream,
        noise=noise,
        grammar=_grammar_of(request, grammars),
        namespace=_namespace_of(request, caches),
    )


def _check(request: Request, *, vocab_size: int, max_model_len: int, has_tokenizer: bool, takes_priority: bool) -> None:
    sampling = request.sampling
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise RequestError("the prompt is empty: give at least one token", param="prompt")
    for name, ids in (
        ("prompt", request.prompt_token_ids),
        ("prediction", request.prediction_token_ids),
        ("stop_token_ids", sampling.stop_token_ids),
        *sampling.rules.greatest_ids(),  # at hand, however many there are: each choice of a request is checked
    ):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise RequestError(f"{name} has a token id outside 0..{vocab_size - 1}", param=name)
    if len(request.prediction_token_ids) > max_model_len:
        raise RequestError(
            f"prediction has {len(request.prediction_token_ids)} tokens, and no output has more than {max_model_len}: "
            "shorten it",
            param="prediction",
        )
    room = max_model_len - num_prompt
    if room < (sampling.max_tokens or 1):
        wanted = f" and {sampling.max_tokens} to generate" if sampling.max_tokens else ""
        raise ContextTooLong(
            f"this model's maximum context length is {max_model_len} tokens, but the request has "
            f"{num_prompt} prompt tokens{wanted}: shorten the prompt or lower max_tokens",
            param="prompt" if room < 1 else "max_tokens",
        )
    stream = request.noise_stream
    if stream is not None and not 0 <= stream < MAX_COUPLED_STREAMS:
        raise RequestError(
            f"noise_stream must be within 0..{MAX_COUPLED_STREAMS - 1}, got {shown(stream)}", param="noise_stream"
        )
    if abs(request.priority) > _MOST_PRIORITY:
        raise RequestError(
            f"priority must be within -{_MOST_PRIORITY}..{_MOST_PRIORITY}, got {shown(request.priority)}",
            param="priority",
        )
    if request.priority and not takes_priority:
        raise RequestError(
            'priorities are off here: leave priority out or 0 (the scheduling policy "priority" takes them)',
            param="priority",
        )
    limit = request.num_speculative_tokens
    if limit is not None and not 0 <= limit <= MAX_SPECULATIVE_TOKENS:
        raise RequestError(
            f"num_speculative_tokens must be within 0..{MAX_SPECULATIVE_TOKENS}, got {shown(limit)}",
            param="num_speculative_tokens",
        )
    if sampling.stop and not has_tokenizer:
        raise RequestError("stop strings need a tokenizer", param="stop")


def _namespace_of(request: Request, caches: CacheSet | None) -> HeldNamespace | None:
    if caches is None or request.namespace is None:
        return None
    return caches.hold(request.namespace, request.namespace_terms)


def _grammar_of(request: Request, grammars: GrammarCompiler | None) -> GrammarState | None:
    output = request.sampling.structured_output
    if output is None:
        return None
    if grammars is None:
        raise RequestError(f"{output.param} needs a tokenizer", param=output.param)
    return grammars.compile(output)
