"""Our drafter in other engines: ``vllm`` and ``vllm_v2`` for vLLM, ``transformers`` for ``model.generate``.

Both draft with ``ssd.drafting`` from a namespace of the retrieval cache and append to it what was completed. The
target, its sampling and its verification are the other engine's. Importing this package imports neither engine.
"""
