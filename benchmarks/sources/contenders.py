"""Engines that differ in nothing but the sources they draft from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ssd.bundled import MODEL_PATH
from ssd.config import DraftConfig, EngineConfig
from ssd.engine import Engine
from ssd.text.codec import TextCodec

OFF = "off"
ALL = "all together"
RETRIEVAL = "retrieval"
RECYCLING = "recycling"
HEAD = "draft head"
MODEL = "draft model"


@dataclass(frozen=True, slots=True)
class Contender:
    """Which sources draft."""

    name: str
    retrieval: bool = False
    recycling: bool = False
    head: Path | None = None
    draft_model: str | None = None


def contenders(head: Path | None, draft_model: str | None) -> list[Contender]:
    """Speculation off, each source that there is alone, and all of them together."""
    alone = [Contender(RETRIEVAL, retrieval=True), Contender(RECYCLING, recycling=True)]
    if head is not None:
        alone.append(Contender(HEAD, head=head))
    if draft_model is not None:
        alone.append(Contender(MODEL, draft_model=draft_model))
    return [
        Contender(OFF),
        *alone,
        Contender(ALL, retrieval=True, recycling=True, head=head, draft_model=draft_model),
    ]


def own_head(model: str | Path) -> Path | None:
    """The draft head that comes with the bundled model, where it is the model and one does."""
    shipped = MODEL_PATH.parent / "head"
    return shipped if Path(model) == MODEL_PATH and (shipped / "config.json").is_file() else None


def open_engine(
    contender: Contender,
    model: str | Path,
    codec: TextCodec,
    *,
    max_length: int,
    limit: int,
    dtype: str,
    device: str,
) -> Engine:
    """An engine of one slot, with a model of its own as it is served, ready. ``limit`` : most tokens of a draft.

    Takes the memory of the model for each contender. Raises ModelError where a model or head cannot be loaded.
    """
    is_off = contender.name == OFF
    engine = Engine.from_pretrained(
        model,
        dtype=dtype,
        device=device,
        codec=codec,
        config=EngineConfig(max_num_seqs=1, max_model_len=max_length, enable_prefix_caching=False),
        draft=DraftConfig(num_speculative_tokens=limit, retrieval=contender.retrieval, recycling=contender.recycling),
        drafter="none" if is_off else "ssd",
        draft_head=contender.head,
        draft_model=contender.draft_model,
    )
    engine.warm_up()
    return engine
