"""What chose the default of each setting of ``ssd.config`` that decides how fast the service is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Choice:
    """``values`` : the defaults that were chosen together, by class and field. ``decides`` : what depends on them.

    ``chosen_by`` : the run or the reason; empty where there is neither.
    """

    values: dict[str, Any]
    decides: str
    chosen_by: str = ""


CHOICES: Final = (
    Choice(
        {"DraftConfig.num_speculative_tokens": 64},
        "longest draft",
        "a text of 400 tokens seen five times takes 24 passes at 16, 7 at 64; a pass of 65 positions takes 2.1 plain "
        "ones (`ssd-cache evaluate --measure`)",
    ),
    Choice(
        {"DraftConfig.draft_shape": "auto"},
        "trees for one sequence, chains for a batch",
        "trees over chains: alone 1.07x, 1.04x without repeats; in sampled batches of 4 0.99x and 0.95x",
    ),
    Choice(
        {"DraftConfig.max_match_length": 32, "DraftConfig.min_match_length": 1},
        "tail that is looked up",
        "one search answers for all lengths, the acceptance model judges them",
    ),
    Choice(
        {"IndexConfig.capacity_tokens": 1 << 22},
        "text kept",
        "memory, 8 to 9 bytes a token: a draft takes up to twice as long among 16M as among 1M (`benchmarks.index`)",
    ),
    Choice(
        {"IndexConfig.flush_tokens": 4096},
        "length of a sealed tail",
        "a seal took 2.7 ms; a backlog of 16M tokens sorts each 5.5 times, with 16,000 4.2 times",
    ),
    Choice(
        {"IndexConfig.merge_fanout": 4},
        "neighbours merged into one",
        "16M tokens at a steady rate: each sorted 4.0 times, 14 segments; no other value tried",
    ),
    Choice({"IndexConfig.rebuild_interval_s": 1.0}, "age at which a tail is sealed", "bounds only what a kill loses"),
    Choice(
        {"IndexConfig.dedup_block_tokens": 64, "IndexConfig.lead_in_tokens": 32},
        "prompts stored once",
        "a block takes about 100 bytes, a lead-in holds the longest match",
    ),
    Choice(
        {"EngineConfig.enable_prefix_caching": True},
        "keys and values reused",
        "conversations 2.2x, four choices of a prompt 1.7x, unrelated prompts 1.0x",
    ),
    Choice(
        {"EngineConfig.coupled_window": 8},
        "tokens that coupled noise depends on",
        "[agreement of near-variants](../concepts/coupled-sampling.md#measured)",
    ),
    Choice(
        {"EngineConfig.max_num_seqs": 16, "EngineConfig.prefill_chunk_tokens": 512}, "rows and prompt tokens of a step"
    ),
)
