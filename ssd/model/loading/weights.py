"""What a model's weights take of a device's memory, and whether they fit."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ssd.errors import ModelError
from ssd.model.layers.packed_linear import packed_linears
from ssd.model.loading.kv_budget import free_bytes

ADVICE = (
    "choose a smaller dtype, a quantised checkpoint or a smaller model; one model over several GPUs is vLLM's work, "
    "where ssd.integrations.vllm drafts from the same cache"
)


def check_weights_fit(
    name: str,
    config: PreTrainedConfig,
    dtype: torch.dtype | str,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Raise ModelError if the weights alone need more memory than ``device`` has free, before any is read.

    dtype : "auto" is the configuration's. trust_remote_code : as for loading it.
    Builds the model without memory for its weights; seconds for large ones.
    """
    held = config.dtype if dtype == "auto" else dtype
    size = (held if isinstance(held, torch.dtype) else torch.float32).itemsize
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    needed = sum(weight.numel() for weight in model.parameters()) * size
    free = free_bytes(device)
    if needed > free:
        raise ModelError(
            f"model {name!r} needs {needed / 1e9:.1f} GB for its weights, {device} has {free / 1e9:.1f} GB free: "
            f"{ADVICE}"
        )


class WeightBytes(NamedTuple):
    """What a model's weights take; memory that several of them share counts once."""

    plain: int
    """Of parameters and buffers."""
    packed: int
    """Of weights that layers hold in blocks instead."""

    @property
    def total(self) -> int:
        """Both."""
        return self.plain + self.packed


def weight_bytes(model: PreTrainedModel) -> WeightBytes:
    """What ``model`` holds now. O(its layers)."""
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    plain = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return WeightBytes(sum(plain.values()), sum(layer.num_bytes for layer in packed_linears(model)))


log = logging.getLogger(__name__)

_NAMED = 3


def require_complete(name: str, info: Mapping[str, Any]) -> None:
    """Raise ModelError where weights were made up: absent from the checkpoint, or there in another shape.

    ``info`` : the loading info of ``from_pretrained``, in which tied weights are not missing. Weights of the checkpoint
    that the model has no place for are warned of.
    """
    missing, mismatched, unexpected = (
        info.get(f"{kind}_keys") or () for kind in ("missing", "mismatched", "unexpected")
    )
    advice = "the files do not belong together, or some are not there. Download the model again"
    if mismatched:
        key, found, wanted = min(mismatched)
        raise ModelError(
            f"model {name!r}: {len(mismatched)} weights have other shapes than its config.json says, {key} "
            f"{tuple(found)} instead of {tuple(wanted)} among them: {advice}"
        )
    if missing:
        raise ModelError(
            f"model {name!r} lacks {len(missing)} of the weights that its config.json asks for, "
            f"{_some(missing)}: {advice}"
        )
    if unexpected:
        log.warning(
            "model %r has no place for %d weights of its checkpoint, %s: is this its config.json?",
            name, len(unexpected), _some(unexpected),
        )  # fmt: skip


@contextmanager
def no_load_report() -> Iterator[None]:
    """Without transformers' table of what is missing, which `require_complete` says in a line."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _some(keys: Iterable[str]) -> str:
    names = sorted(keys, key=_by_number)
    return ", ".join(names[:_NAMED]) + (" ..." if len(names) > _NAMED else "")


def _by_number(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", name)]
