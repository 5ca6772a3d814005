"""The same requests again at batch 1: how many times faster than without speculation?"""

from __future__ import annotations

from statistics import median

import numpy as np
from transformers import PreTrainedModel

from benchmarks.gpu_check.scene import Found, Scene
from benchmarks.growth import complete
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.engine import Engine
from ssd.model.loading.load_target import open_target
from ssd.retrieval.cache import CacheSet

_OUTPUT_TOKENS = 256


def repeats(scene: Scene, model: PreTrainedModel) -> Found:
    """Greedy requests, prompt included; the first round teaches, the next two are timed, by turns with plain ones."""
    sizes = scene.sizes
    num_tokens = _OUTPUT_TOKENS if scene.device != "cpu" else 24
    random, draft = np.random.default_rng(0), DraftConfig()
    prompts = [random.integers(3, model.config.vocab_size, sizes.context).tolist() for _ in range(4)]
    params = [SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)] * len(prompts)
    everything = range(len(prompts))
    with CacheSet(CacheConfig(), fingerprint="0" * 32, inline=True) as caches:
        on, off = (
            Engine(
                open_target(
                    model,
                    num_slots=1,
                    max_length=sizes.context + num_tokens + 8,
                    max_draft_tokens=draft.num_speculative_tokens,
                    keeps_top=known is not None,
                ),
                drafter=make_drafter(name, draft),
                caches=known,
                # What one side kept of a prompt is not to be compared with the other's.
                config=EngineConfig(max_num_seqs=1, enable_prefix_caching=False),
                draft=draft,
            )
            for name, known in (("ssd", caches), ("none", None))
        )
        on.warm_up()
        off.warm_up()
        complete(on, prompts, params, everything)
        caches.flush()
        ratios, num_differing, taught = [], 0, on.metrics.num_verify_steps
        for number in range(2):
            for index in everything:
                order = (on, off) if (number + index) % 2 else (off, on)
                said = {id(engine): complete(engine, prompts, params, range(index, index + 1)) for engine in order}
                (ours, on_s), (theirs, off_s) = said[id(on)], said[id(off)]
                ratios.append(off_s / on_s)
                num_differing += ours != theirs
        num_steps = on.metrics.num_verify_steps - taught
    found = {
        "speedup_p50": round(median(ratios), 2),
        "speedup_min_max": [round(min(ratios), 2), round(max(ratios), 2)],
        "tokens_per_step": round(2 * len(prompts) * num_tokens / num_steps, 2),
        "differing_outputs": num_differing,
        "requests": len(ratios),
    }
    print(f"  repeats at batch 1: {found['speedup_p50']}x, {found['tokens_per_step']} tokens a step, "
          f"{num_differing} of {len(ratios)} outputs differ", flush=True)  # fmt: skip
    return found
