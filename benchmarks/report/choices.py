"""Which run chose each tuning constant: what the code cannot say of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """Constants of one file that were chosen together.

    ``file`` : below ``ssd/``. ``values`` : each constant's value as the code writes it; of a setting, by class and
    field. ``decides`` : what depends on them. ``chosen_by`` : the run or the reason; empty where there is neither.
    """

    file: str
    values: dict[str, str]
    decides: str
    chosen_by: str = ""


CHOICES: dict[str, tuple[Choice, ...]] = {
    "Settings": (
        Choice(
            "config.py",
            {"DraftConfig.num_speculative_tokens": "64"},
            "longest draft",
            "a text of 400 tokens seen five times takes 24 passes at 16, 7 at 64; a pass of 65 positions takes "
            "2.1 plain ones (`benchmarks.replay.measure_cost`)",
        ),
        Choice(
            "config.py",
            {"DraftConfig.draft_shape": "'auto'"},
            "trees for one sequence, chains for a batch",
            "trees over chains: alone 1.07x, 1.04x without repeats; in sampled batches of 4 0.99x and 0.95x",
        ),
        Choice(
            "config.py",
            {"DraftConfig.max_match_length": "32", "DraftConfig.min_match_length": "1"},
            "tail that is looked up",
            "one search answers for all lengths, the acceptance model judges them",
        ),
        Choice(
            "config.py",
            {"IndexConfig.capacity_tokens": "1 << 22"},
            "text kept",
            "memory, 9 to 12 bytes a token: a draft takes 17 us among 1M tokens, 22 us among 16M (`benchmarks.index`)",
        ),
        Choice(
            "config.py",
            {"IndexConfig.eviction": "'used'"},
            "what leaves a full cache",
            "`benchmarks.flooding`, mean of 14 traces, 200,000 tokens kept: 47.7 tokens a step after "
            "2,000,000 random ones, 2.9 with fifo",
        ),
        Choice(
            "config.py",
            {"IndexConfig.seal_tokens": "4096"},
            "length of a sealed tail",
            "a seal takes 2.7 ms (`benchmarks.index`); a backlog of 16M tokens sorts each 5.5 times, "
            "with 16,000 4.2 times",
        ),
        Choice(
            "config.py",
            {"IndexConfig.merge_fanout": "4"},
            "neighbours merged into one",
            "16M tokens at a steady rate: each sorted 4.0 times, 14 segments; no other value tried",
        ),
        Choice(
            "config.py",
            {"IndexConfig.rebuild_interval_s": "1.0"},
            "age at which a tail is sealed",
            "bounds only what a kill loses",
        ),
        Choice(
            "config.py",
            {"IndexConfig.dedup_block_tokens": "64", "IndexConfig.lead_in_tokens": "32"},
            "prompts stored once",
            "a block takes about 100 bytes, a lead-in holds the longest match",
        ),
        Choice(
            "config.py",
            {"EngineConfig.enable_prefix_caching": "True"},
            "keys and values reused",
            "conversations 2.2x, four choices of a prompt 1.7x, unrelated prompts 1.0x",
        ),
        Choice(
            "config.py",
            {"EngineConfig.coupled_window": "8"},
            "tokens that coupled noise depends on",
            "`benchmarks.coupled --windows`, near-variants: the same token at 0.46 to 0.54 of places with 1 to 32 "
            "(± 0.05), in blocks 0.48 with 1 or 2, 0.41 with more (± 0.04); with few tokens unrelated answers of a "
            "stream depend on each other, with many two that parted meet again later",
        ),
        Choice(
            "config.py",
            {"EngineConfig.max_num_seqs": "16", "EngineConfig.prefill_chunk_tokens": "512"},
            "rows and prompt tokens of a step",
        ),
        Choice(
            "config.py",
            {"CacheConfig.memory_bytes": "1 << 30"},
            "copies of segments that no one else can change",
            "safety, not speed: a proposal takes 13.2 us from copies, 13.4 us from maps",
        ),
    ),
    "Prices, and whom to ask": (
        Choice(
            "pricing/pass_costs.py",
            {"FORGETTING": "0.98", "_LASTING_SHARE": "0.05"},
            "weight of older and of start-up passes in the fit",
            "with this fit sampled new text at batch 1 went from 0.94x to 0.97x ... 1.01x (three runs each); "
            "no other value tried",
        ),
        Choice(
            "pricing/pass_costs.py",
            {"OUTLIER": "5.0", "_MIN_PASSES": "8.0", "_MIN_VARIANCE": "0.05"},
            "passes that say too little",
        ),
        Choice(
            "pricing/rate.py",
            {"FORGETTING": "0.99"},
            "recent passes that a draft is judged with",
            "judging so gave 1.89x, was 1.84x, over 14 traces at the measured cost; no other value tried",
        ),
        Choice("pricing/rate.py", {"_STEP_FORGETTING": "0.95"}, "a draft model's time"),
        Choice(
            "pricing/calibration.py",
            {"_FORGETTING": "0.97", "_FORGETTING_UNTRIED": "0.999", "_PRIOR_TOKENS": "1.0"},
            "how soon broken promises are distrusted, and tried again",
            "`benchmarks.overhead`, sampled new text at batch 1: 1.20 tokens drafted a step and 0.96x "
            "with 0.99, 0.99 and 4, 0.45 and 0.98x with these; faster layers came between",
        ),
        Choice(
            "engine/proposals.py",
            {"_SURE": "0.9"},
            "drafts in the first token's pass",
            "`benchmarks.overhead`, with the first calibration: time to the first token over plain 1.12 -> 1.02, "
            "adversarial 1.28 -> 0.995; no other value tried",
        ),
        Choice(
            "pricing/calibration.py",
            {"_SHARE": "0.0075"},
            "time for rows that get nothing",
            "asking all rows at every step cost 4.4 % of the tokens/s at batch 32 of new text; with this "
            "(0.01 at first) all of speculation costs 0.6 % (`benchmarks.overhead`)",
        ),
        Choice(
            "pricing/calibration.py",
            {
                "_FRUITLESS_AFTER": "4",
                "_LONGEST_PAUSE": "8",
                "_TIME_FORGETTING": "0.9",
            },
            "which rows, and how long they rest",
        ),
        Choice(
            "pricing/calibration.py",
            {"_SHARE_IN_DEBT": "0.0015", "_FRUITLESS_AFTER_IN_DEBT": "1", "_LONGEST_PAUSE_IN_DEBT": "32"},
            "the same where drafts do not pay",
        ),
        Choice(
            "pricing/account.py",
            {"_CREDIT": "1.0", "_MOST": "4.0", "_MARGIN": "1.25"},
            "when drafts that have not paid are not verified any more, and again",
        ),
        Choice(
            "drafting/rows.py",
            {"_PRICE_UNKNOWN": "0.1"},
            "price while step times are unknown",
            "a prototype's threshold, mean of 14 traces, tokens a step @ drafted: 0.2 2.47 @ 3.3, 0.1 2.62 @ 4.7, "
            "0.05 2.68 @ 6.1",
        ),
        Choice(
            "drafting/source.py",
            {"TRIAL_EVERY": "256", "_TRIAL_SHARE": "0.01"},
            "trials of a source that does not pay",
            "at most 1 % of the output; a draft model as large as its target drafts 0 %, was up to 40 %",
        ),
        Choice(
            "drafting/arbiter.py",
            {"_PROMISE_SHARE": "0.6", "_FORGETTING": "0.8"},
            "what a request's next steps bring",
            "recorded requests beside a recorded drafter, instructcoder: 0.2 5.69x, 0.6 5.69x, 1.0 5.63x; at the rate "
            "of all steps instead 5.51x, was 5.68x",
        ),
        Choice(
            "drafting/arbiter.py",
            {"_MOST_PREFIXES": "5", "_MOST_CARRIED": "4"},
            "what is looked up behind another's draft",
            "recorded requests beside a recorded drafter, four files: without 5.69, 2.39, 2.35, 2.57x; 5 and 4 5.80, "
            "2.45, 2.44, 2.62x; 5 and 8 5.76, 2.43, 2.45, 2.61x; 3 and 16 5.66, 2.43, 2.42, 2.60x",
        ),
        Choice(
            "pricing/rate.py",
            {"_FIRST_EXCESS": "1.0", "_EXCESS_WEIGHT": "8.0", "_EXCESS_MEMORY": "500.0", "_EXCESS_LEANING": "12.0"},
            "what asking a source should bring",
        ),
        Choice(
            "pricing/rate.py",
            {
                "_FIRST_GUESS": "0.7",
                "_FIRST_WEIGHT": "20.0",
                "_MEMORY": "2000.0",
                "_LEANING": "8.0",
                "_RELAXATION": "0.99",
            },
            "what a draft model may get accepted",
        ),
        Choice(
            "pricing/calibration.py",
            {"_LEARNING_RATE": "0.02", "_CLIP": "6.0"},
            "correction of a draft model's chances",
        ),
    ),
    "Evidence": (
        Choice(
            "drafting/noise.py",
            {"WINDOW": "8"},
            "tokens that coupled noise depends on, where nothing is asked for",
            "as `coupled_window`",
        ),
        Choice(
            "drafting/lookup.py",
            {"MAX_LEVELS": "3", "ENOUGH_SUPPORT": "16.0"},
            "match lengths compared",
            "6 and 64 before; with the reversed index a draft takes 9-14 us, was 23-34, tokens a step within 0.6 %",
        ),
        Choice(
            "drafting/lookup.py",
            {"MAX_SEGMENT_SAMPLES": "24"},
            "places sampled",
            "tokens a step within 0.4 % of 64; with fewer calls 17.8 us at 16M tokens, was 18.7",
        ),
        Choice("drafting/lookup.py", {"MAX_SCANNED_SAMPLES": "32"}, "places sampled, unsorted text"),
        Choice(
            "drafting/lookup.py",
            {"MAX_FOLLOWED": "8"},
            "places kept to the next step",
            "following takes 4.6 us, searching 17, at 16M tokens; no other value tried",
        ),
        Choice("drafting/vote.py", {"MAX_VOTED": "12", "MAX_RECYCLED": "6"}, "tokens judged, trees"),
        Choice("drafting/grow.py", {"CHAIN_CANDIDATES": "4", "CHAIN_RECYCLED": "2"}, "tokens judged, chains"),
        Choice(
            "drafting/propose.py",
            {"_MOST_CONTINUED": "4"},
            "drafts past the end of their sources",
        ),
        Choice("drafting/grow.py", {"LEAST_CONTINUED": "4"}, "matches that carry a draft on"),
        Choice("drafting/offered.py", {"_LONGEST": "32", "_FAR": "64"}, "a prediction's place, found again"),
    ),
    "Acceptance model": (
        Choice(
            "drafting/acceptance.py",
            {
                "_MIXER_RATE": "0.01",
                "_CONSTANT_RATE": "0.003",
                "_LEAST_RATE": "0.01",
                "_PRIOR_COUNT": "2.0",
                "HASHES": "1024",
                "PAIR_HASHES": "8192",
            },
            "how fast it learns, in how many entries",
            "the whole: 1.13x a suffix tree's accepted tokens at as many drafted (`benchmarks.replay`); "
            "singly not measured",
        ),
        Choice(
            "drafting/acceptance.py",
            {"KNOTS": "33", "KNOTS_PER_UNIT": "2.0", "_KNOT_RATE": "0.02"},
            "curve that corrects estimates",
            "14 traces: calibration error 0.0164 without, 0.0059 with; worst 0.031 and 0.012; 1.912x and 1.923x",
        ),
        Choice(
            "drafting/acceptance.py",
            {"_MOST_WEIGHT": "4.0"},
            "how wrong it can get",
            "four times what replays reach; 21 models of extreme numbers draft again within 7 passes",
        ),
        Choice(
            "drafting/judge.py",
            {"MAX_JUDGED": "48", "_ERROR_RATE": "0.1"},
            "what one draft teaches",
        ),
        Choice(
            "drafting/successors.py",
            {"SUCCESSORS": "8", "AFTER_ONE": "1 << 14", "AFTER_TWO": "1 << 16", "LEAST_SHARE": "1 / 256"},
            "the target's own candidates that are kept",
            "memory, 48 bytes an entry, 3.9 MB a namespace where all is written; token recycling keeps 8 a token too",
        ),
        Choice(
            "drafting/successors.py",
            {"MOST_TABLES": "16", "IDLE_PASSES": "64"},
            "namespaces that have a table of them, and one of what coupled noise chose",
            "memory: 63 MB at most, as much for requests without a namespace, and 128 MB for what noise chose",
        ),
        Choice(
            "drafting/choices.py",
            {"IN_BUCKET": "8", "FIRST_BUCKETS": "1 << 13", "MOST_BUCKETS": "1 << 17", "MOST_CONFIRMED": "3"},
            "what coupled noise chose before",
            "a bucket is a cache line; 8 bytes an entry, 0.5 to 8 MB a namespace; no other value tried",
        ),
        Choice(
            "model/sampling/sampler.py",
            {"_BLOCK": "128"},
            "tokens compared at a time",
            "8 positions of 262,144 tokens take 0.16 ms, torch's argmax 1.9 to 3.3 ms and its topk 3.5 to 6.5 ms",
        ),
        Choice(
            "model/sampling/row_choice.py",
            {"_BLOCK": "128", "_DEPTHS": "(3.0, 5.0, 7.0, 10.0, 16.0)", "_FEW": "8"},
            "how many tokens are hashed at a time, and how far from the best they are looked for",
            "hashing takes 0.39 to 0.42 ns a token with 128, 0.46 to 0.49 with 32; the others were not varied",
        ),
        Choice(
            "drafting/acceptance_model.py",
            {"PUBLISH_S": "10.0"},
            "time between copies to be saved",
            "a copy takes 0.07 ms, 1.5 ms in new memory: of 256 busy namespaces at most 4 % of the time",
        ),
    ),
    "Upkeep of the index": (
        Choice(
            "retrieval/index.py",
            {"_KEPT_SHARE": "0.5"},
            "room for text that was of use",
            "`benchmarks.flooding`, caches too small for their traffic, tokens a step with fifo -> used: "
            "8,192 tokens 2.39 -> 2.41, 131,072 2.61 -> 2.63",
        ),
        Choice(
            "retrieval/usage.py",
            {"WINDOW_TOKENS": "8", "BLOCK_TOKENS": "64", "_TOKENS_PER_SLOT": "8"},
            "how use is noticed",
            "memory: 1 to 2 bytes a token of capacity; else not measured",
        ),
        Choice(
            "retrieval/upkeep.py",
            {"_MERGED_IN_PROCESS": "1 << 14"},
            "merges too small for the worker",
            "sorting 4,096 tokens takes 0.6 ms (`benchmarks.index`); asking the worker was not timed",
        ),
        Choice(
            "retrieval/upkeep.py",
            {"_MANY_SEGMENTS": "64"},
            "when nothing waits for the worker",
            "300 seals with the worker stopped: 65 segments, 17 us a match; before, 300 and 119 us",
        ),
        Choice(
            "retrieval/static.py",
            {"DEFAULT_SEGMENT_TOKENS": "16 << 20"},
            "segments that the builder makes",
            "sorting takes about 3 s and 10 to 14 bytes a token",
        ),
        Choice("retrieval/upkeep.py", {"SAVE_LEARNED_S": "60.0"}, "saves of what was learned"),
    ),
    "Sharing": (
        Choice(
            "sharing/reader.py",
            {"GATHER_S": "0.05"},
            "how long a reader that has read all lets entries gather",
            "`benchmarks.fleet`: redis-server takes 20 to 25 us a reply and about 1 us an entry in it, so 64 readers "
            "of 200 entries/s cost 4 % of its core, 27 % without; on average 25 ms later",
        ),
    ),
    "Engine": (
        Choice(
            "engine/proposals.py",
            {"_ROWS": "8", "_WIDTHS": "(1, 2, 5)", "_TIMES": "4", "_MOST_S": "2.0"},
            "sizes of passes timed at start-up",
            "a start's time; not measured",
        ),
        Choice(
            "engine/schedule.py",
            {"_LEAST_COPIED": "16"},
            "shortest piece copied",
            "a copy costs two operations a layer",
        ),
        Choice(
            "engine/schedule.py",
            {"_RESERVED_PART": "4"},
            "part of the budget for who came first",
            "a prompt takes at most 4 times its steps",
        ),
        Choice("engine/schedule.py", {"AGEING_STEPS": "64"}, "what waiting is worth"),
    ),
}
