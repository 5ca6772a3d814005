"""Use of SSD's drafter in other engines: ``vllm`` and ``vllm_v2``, ``sglang``, ``transformers`` for ``model.generate``.

The drafts come from a namespace of the retrieval cache, to which completed text is added. The other engine runs the
model, samples, and verifies the drafts. Importing this package imports neither vLLM nor transformers.
"""
