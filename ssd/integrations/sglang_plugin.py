r"""The plugin entry point ``sglang.srt.plugins``: SSD's retrieval cache as the corpus of SGLang's NGRAM worker.

::

    SSD_CACHE_DIR=cache/ python -m sglang.launch_server --model-path MODEL --speculative-algorithm NGRAM \
      --speculative-num-draft-tokens 8

SGLang calls ``register`` in each of its processes. Without a setting of ``ssd.integrations.settings`` in the
environment, nothing is changed. ``register`` checks in SGLang's source files, without importing them, that they have
all functions on which `ssd.integrations.sglang` relies. If one is missing, a log line states the reason, and SGLang
keeps its own corpus.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any, Final

from ssd.integrations.vllm_hooks import Hook, missing_hooks

log = logging.getLogger("sglang.ssd")

WORKER: Final = "sglang.srt.speculative.ngram_worker"
CORPUS: Final = "sglang.srt.speculative.cpp_ngram.ngram_corpus"
_ENABLED_BY: Final = ("SSD_CACHE_DIR", "SSD_REDIS_URL", "SSD_WARM_DIRS")

HOOKS: Final = (
    Hook(WORKER, "NGRAMWorker", ("_prepare_draft_tokens", "_update_ngram_corpus", "ngram_corpus")),
    Hook(WORKER, "NGRAMWorker.__init__", ("self", "server_args", "gpu_id", "nccl_port", "target_worker")),
    Hook(WORKER, "NGRAMWorker._prepare_draft_tokens", ("self", "batch")),
    Hook(CORPUS, "NgramCorpus.batch_get", ("self", "req_ids", "batch_tokens", "total_lens")),
    Hook(CORPUS, "NgramCorpus.erase_match_state", ("self", "req_ids")),
    Hook("sglang.srt.plugins.hook_registry", "HookRegistry", ("register", "apply_hooks")),
)


def register() -> None:
    """Replace SGLang's n-gram corpus by SSD's if ``SSD_CACHE_DIR``, ``SSD_REDIS_URL`` or ``SSD_WARM_DIRS`` is set."""
    if not any(os.environ.get(name) for name in _ENABLED_BY):
        return
    if missing := missing_hooks(HOOKS):
        log.warning(
            "SSD does not support the installed SGLang: %s. SGLang drafts from its own n-gram corpus instead",
            "; ".join(missing),
        )
        return
    registry: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    from ssd.integrations.sglang import SsdCorpus, remember_prompts, remember_server

    for target, hook, kind in (
        (f"{WORKER}.NgramCorpus", SsdCorpus, "REPLACE"),
        (f"{WORKER}.NGRAMWorker.__init__", remember_server, "BEFORE"),
        (f"{WORKER}.NGRAMWorker._prepare_draft_tokens", remember_prompts, "BEFORE"),
    ):
        registry.HookRegistry.register(target, hook, getattr(registry.HookType, kind))
