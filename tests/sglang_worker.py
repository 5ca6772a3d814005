"""SGLang's own NGRAM worker with SSD's corpus, on a CPU: ``python -m tests.sglang_worker DIRECTORY`` prints JSON.

SGLang is imported from ``DIRECTORY``. Packages that are missing, such as its GPU kernels, are replaced by empty ones;
the worker's methods and the hook registry are the real ones. The batch and the target are made here: the target says
what a script says, and its verification follows the tree that the worker gets.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import sys
import types
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ssd.bundled import MODEL_PATH


class Anything:
    """Stands for whatever an absent package would give."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) and not kwargs else Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, _key: object) -> Any:
        return self

    def __mro_entries__(self, _bases: object) -> tuple[type, ...]:
        return (object,)

    def __or__(self, _other: object) -> Any:
        return self

    __ror__ = __or__


def stand_in(name: str) -> None:
    def attribute(wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return Anything()

    module: Any = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__, module.__version__, module.__getattr__ = [], "0", attribute
    sys.modules[name] = module


def load(name: str) -> Any:
    for _ in range(100):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not error.name or error.name.startswith("sglang"):
                raise
            stand_in(error.name)
            for key in [key for key in sys.modules if key.startswith("sglang")]:
                del sys.modules[key]
    raise SystemExit(f"{name} cannot be imported")


SIZE, DEPTH, STEPS = 8, 18, 40


def main(directory: str) -> None:
    sys.path.insert(0, directory)
    worker_module = load("sglang.srt.speculative.ngram_worker")
    plugin = importlib.import_module("ssd.integrations.sglang_plugin")
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    plugin.register()
    registry.HookRegistry.apply_hooks()
    sglang = importlib.import_module("ssd.integrations.sglang")
    sglang.remember_server(
        None, SimpleNamespace(model_path=str(MODEL_PATH), tokenizer_path=None, tp_size=1, context_length=512)
    )
    worker_class = worker_module.NGRAMWorker
    corpus = worker_module.NgramCorpus(draft_token_num=SIZE, max_trie_depth=DEPTH, capacity=1 << 20)
    worker = SimpleNamespace(
        draft_token_num=SIZE,
        max_trie_depth=DEPTH,
        enable_overlap=True,
        ngram_corpus=corpus,
        _efficient_concat_last_n=lambda a, b, n: worker_class._efficient_concat_last_n(None, a, b, n),
    )
    random = np.random.default_rng(0)
    scripts = {name: random.integers(1, 4000, 60).tolist() for name in ("a", "b")}
    steps, equal = [], True
    for attempt in range(2):
        steps.append(0)
        requests = [
            SimpleNamespace(rid=f"{name}{attempt}", script=script, origin_input_ids_unpadded=script[:20], output_ids=[])
            for name, script in scripts.items()
        ]
        new = [[request.script[20]] for request in requests]  # of the prefill
        while requests:
            width = torch.zeros((len(requests), SIZE), dtype=torch.int64)
            for row, tokens in enumerate(new):
                width[row, : len(tokens)] = torch.tensor(tokens)
            info = SimpleNamespace(accept_tokens=width.flatten(), accept_lens=torch.tensor([len(each) for each in new]))
            batch = SimpleNamespace(reqs=requests, spec_info=info, grammar_needs_sync=lambda: False)
            drafts, mask = worker_class._prepare_draft_tokens(worker, batch)
            worker_class._update_ngram_corpus(worker, batch)
            steps[-1] += 1
            for request, tokens in zip(requests, new, strict=True):
                request.output_ids += tokens
            new = [
                verify(drafts[row * SIZE : (row + 1) * SIZE], mask.reshape(-1, SIZE, SIZE)[row], request)
                for row, request in enumerate(requests)
            ]
            over = [len(each) == 0 for each in new]
            gone = [request for request, is_over in zip(requests, over, strict=True) if is_over]
            equal &= all(request.output_ids == request.script[20:] for request in gone)
            corpus.erase_match_state([request.rid for request in gone])
            new = [tokens for tokens, is_over in zip(new, over, strict=True) if not is_over]
            requests = [request for request, is_over in zip(requests, over, strict=True) if not is_over]
    stats = corpus.cache.stats()
    print(
        json.dumps(
            {
                "is_ours": worker_module.NgramCorpus is sglang.SsdCorpus,
                "steps": steps,
                "equal": equal,
                "failures": corpus.num_failures,
                "stored": stats.num_stored,
                "running": stats.num_running,
            }
        )
    )


def verify(tokens: Any, mask: Any, request: Any) -> list[int]:
    """The tokens that a target accepts, which says what the script says: down the tree, then one of its own."""
    coming = request.script[20 + len(request.output_ids) :]
    assert tokens[0] == request.script[19 + len(request.output_ids)], "the root is the last token of the text"
    assert mask.diagonal().all() and mask[:, 0].all()
    node, accepted = 0, list[int]()
    while len(accepted) < len(coming):
        depth = mask[node].sum()
        following = [
            child
            for child in range(1, SIZE)
            if mask[child, node] and mask[child].sum() == depth + 1 and tokens[child] == coming[len(accepted)]
        ]
        accepted.append(coming[len(accepted)])
        if not following:
            break
        node = following[0]
    return accepted


if __name__ == "__main__":
    main(sys.argv[1])
