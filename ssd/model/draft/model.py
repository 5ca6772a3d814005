"""Loading a smaller model as a drafter: it goes on writing where the target stopped, and the target checks it."""

from __future__ import annotations

from pathlib import Path

from ssd.errors import ModelError
from ssd.model.draft.drafter import DraftModelDrafter
from ssd.model.draft.slots import READ_WIDTH
from ssd.model.loading.load_target import load_model, model_limit, open_target
from ssd.model.target import Target
from ssd.text.codec import TextCodec
from ssd.text.load_tokenizer import HubOptions


def load_draft_model(
    name_or_path: str | Path,
    target: Target,
    codec: TextCodec,
    *,
    dtype: str = "auto",
    device: str = "auto",
    hub: HubOptions | None = None,
    enforce_eager: bool = False,
) -> DraftModelDrafter:
    """A drafter around a Hugging Face causal language model that shares the target's tokenizer.

    codec : the target's. hub : where an id is fetched from. The others are as for the target. Contexts longer than the
    draft model takes get no drafts. Raises ModelError when it cannot be loaded, has another tokenizer or does not fit.
    """
    own = TextCodec.load(str(name_or_path), hub)
    if own.fingerprint != codec.fingerprint:
        raise ModelError(
            f"draft model {str(name_or_path)!r} has another tokenizer than the target: {own.vocab_size} tokens "
            f"(fingerprint {own.fingerprint}), expected {codec.vocab_size} ({codec.fingerprint}). Choose a draft model "
            "of the target's family, or leave the draft model out"
        )
    model = load_model(name_or_path, dtype=dtype, device=device, hub=hub)
    vocab_size: int = model.config.get_text_config().vocab_size
    if vocab_size < codec.vocab_size:
        raise ModelError(
            f"draft model {str(name_or_path)!r} scores {vocab_size} tokens, but its tokenizer has {codec.vocab_size}: "
            "its files do not belong together. Download it again"
        )
    limit = model_limit(model)
    draft_target = open_target(
        model,
        num_slots=target.num_slots,
        max_length=target.max_length if limit is None else min(limit, target.max_length),
        max_draft_tokens=READ_WIDTH - 1,
        enforce_eager=enforce_eager,
        exact="off",  # a draft may be any
    )
    return DraftModelDrafter(draft_target, vocab_size=target.vocab_size)
