"""One plain and one verify step of the large shape under the profiler."""

from __future__ import annotations

import benchmarks.profile.command as profile
from benchmarks.decode.shapes import random_model
from benchmarks.gpu_check.scene import Found, Keep, Scene


def profiles(scene: Scene, keep: Keep) -> Found:
    """Steps of one and of 16 positions a row, at every batch size; the traces go beside the result."""
    sizes = scene.sizes
    model = random_model(sizes.large, dtype=scene.served_dtype, device=scene.device, speaks=True)
    drafts = (0, 15) if scene.device != "cpu" else (0, 3)
    out = None if scene.out is None else scene.out / "traces"
    found = profile.profiles(model, None, sizes.profile_batch, drafts, sizes.context, sizes.rounds, 4, out)
    return {"passed": True, **found}
