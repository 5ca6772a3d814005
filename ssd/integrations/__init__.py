"""The drafter in other engines: ``vllm`` and ``vllm_v2`` for vLLM, ``transformers`` for ``model.generate``.

They draft with ``ssd.drafting`` from a namespace of the retrieval cache and add completed text to it. The target, its
sampling and its verification are those of the other engine. Importing this package imports neither engine.
"""
