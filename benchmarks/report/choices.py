"""The reasons for the defaults in ``ssd.config`` that affect the speed of the service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Choice:
    """Defaults that were chosen together, and the reason.

    Attributes:
        values: The defaults by class and field.
        decides: What the defaults affect.
        chosen_by: The measurement or the reason; empty if there is none.
    """

    values: dict[str, Any]
    decides: str
    chosen_by: str = ""


CHOICES: Final = (
    Choice(
        {"DraftConfig.num_speculative_tokens": 64},
        "maximum number of draft tokens",
        "A text of 400 tokens that the cache contains takes 24 forward passes with a limit of 16, and 7 with 64. A "
        "pass of 65 tokens takes 2.1 times as long as a pass of one token.",
    ),
    Choice(
        {"DraftConfig.draft_shape": "auto"},
        "`auto`: draft trees for a single sequence, draft chains for a batch",
        "For a single sequence, trees are 1.04 to 1.07 times as fast as chains. In sampled batches of 4, trees are "
        "0.95 to 0.99 times as fast.",
    ),
    Choice(
        {"DraftConfig.max_match_length": 32, "DraftConfig.min_match_length": 1},
        "longest and shortest matched context, in tokens",
        "One search finds matches of all lengths, and the acceptance model rates them.",
    ),
    Choice(
        {"IndexConfig.capacity_tokens": 1 << 22},
        "number of tokens in the cache (`--cache-tokens`)",
        "The cache takes 8 to 9 bytes of memory per token. Drafting from 16 million tokens takes up to twice as long "
        "as from 1 million.",
    ),
    Choice(
        {"IndexConfig.flush_tokens": 4096},
        "number of new tokens that are flushed to a segment",
        "A flush took 2.7 ms.",
    ),
    Choice(
        {"IndexConfig.merge_fanout": 4},
        "number of neighbouring segments that are merged into one",
        "With 16 million tokens, each token was sorted 4.0 times, and 14 segments were left. No other value was tried.",
    ),
    Choice(
        {"IndexConfig.rebuild_interval_s": 1.0},
        "age in seconds at which new text is flushed",
        "If the server crashes, only the text of the last second is lost.",
    ),
    Choice(
        {"IndexConfig.dedup_block_tokens": 64, "IndexConfig.lead_in_tokens": 32},
        "block size for the deduplication of prompts, and tokens stored before each new block",
        "A block takes about 100 bytes. The stored tokens before it are as long as the longest match.",
    ),
    Choice(
        {"EngineConfig.enable_prefix_caching": True},
        "reuse of the KV cache for common beginnings of prompts",
        "Conversations are 2.2 times as fast, four outputs of one prompt 1.7 times. Unrelated prompts do not change.",
    ),
    Choice(
        {"EngineConfig.coupled_window": 8},
        "number of preceding tokens that determine the noise of coupled sampling",
        "[Measured](../concepts/coupled-sampling.md#measured) with prompts in which one name is changed.",
    ),
    Choice(
        {"EngineConfig.max_num_seqs": 16, "EngineConfig.prefill_chunk_tokens": 512},
        "maximum number of running sequences, and prompt tokens per prefill chunk",
    ),
)
