"""From a request to the sequence the engine works on: checked first, so that what is queued can be served."""

from __future__ import annotations

from ssd.config import DraftAcceptance
from ssd.engine.admission import check_request
from ssd.engine.request import Request
from ssd.engine.sequence import Sequence
from ssd.errors import RequestError
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.namespace import HeldNamespace
from ssd.text.codec import TextCodec
from ssd.text.grammar import GrammarCompiler, GrammarState
from ssd.text.stream import TextStream


def open_sequence(
    request: Request,
    *,
    codec: TextCodec | None,
    grammars: GrammarCompiler | None,
    caches: CacheSet | None,
    vocab_size: int,
    max_length: int,
    eos_token_ids: tuple[int, ...],
    seed: int,
    acceptance: DraftAcceptance,
    takes_priority: bool,
) -> Sequence:
    """The sequence of a request, before its first step; raises RequestError where it cannot be served."""
    check_request(
        request,
        vocab_size=vocab_size,
        max_model_len=max_length,
        has_tokenizer=codec is not None,
        takes_priority=takes_priority,
    )
    sampling = request.sampling
    stream = None
    if codec is not None:
        stream = TextStream(codec, stop=sampling.stop, include_stop=sampling.include_stop_str_in_output)
    return Sequence(
        request,
        max_length=max_length,
        eos_token_ids=eos_token_ids,
        stream=stream,
        seed=seed,
        acceptance=acceptance,
        grammar=_grammar_of(request, grammars),
        namespace=_namespace_of(request, caches),
    )


def _namespace_of(request: Request, caches: CacheSet | None) -> HeldNamespace | None:
    return None if caches is None or request.namespace is None else caches.hold(request.namespace)


def _grammar_of(request: Request, grammars: GrammarCompiler | None) -> GrammarState | None:
    output = request.sampling.structured_output
    if output is None:
        return None
    if grammars is None:
        raise RequestError(f"{output.param} needs a tokenizer", param=output.param)
    return grammars.compile(output)
