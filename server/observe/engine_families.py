"""What the engine counts, as metric families."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, Metric

from server.observe.families import Families
from server.running.latencies import LABELS

if TYPE_CHECKING:
    from ssd.engine import Engine, EngineMetrics

FINISHED_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""Ours to vLLM's."""


def engine_families(engine: Engine, families: Families) -> Iterator[Metric]:
    """All of a loaded engine."""
    target, config = engine.target, engine.config
    yield families.info(
        "ssd:target_info", "How the model is driven.", way=target.way, speculates=str(target.can_roll_back).lower()
    )
    yield families.info(
        "vllm:cache_config_info",
        "The KV cache: a block is a slot, which holds one sequence of up to the context's length.",
        block_size=str(engine.max_model_len),
        num_gpu_blocks=str(target.num_slots),
        enable_prefix_caching=str(config.enable_prefix_caching),
    )
    counts = engine.metrics
    yield from _speculation(counts, families)
    yield from _load(counts, families)
    yield from _histograms(counts, families)


def _speculation(counts: EngineMetrics, families: Families) -> Iterator[Metric]:
    counter = families.counter
    yield counter("vllm:spec_decode_num_drafts", "Drafts that were not empty.", counts.num_drafts)
    yield counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", counts.num_draft_tokens)
    yield counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens emitted.", counts.num_accepted_tokens)
    per_position = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens emitted, by place.", labels=[*LABELS, "position"]
    )
    for position, accepted in enumerate(list(counts.accepted_per_position)):
        per_position.add_metric([*families.labels, str(position)], accepted)
    yield per_position
    for name, text in (
        ("num_draft_tokens", "Drafted tokens, by source."),
        ("num_accepted_tokens", "Draft tokens emitted, by source."),
    ):
        by_source = CounterMetricFamily(f"ssd:source_{name.removeprefix('num_')}", text, labels=[*LABELS, "source"])
        for source, drafted in dict(counts.by_source).items():
            by_source.add_metric([*families.labels, source], getattr(drafted, name))
        yield by_source
    yield counter("ssd:verify_steps", "Rows verified, with a draft or without.", counts.num_verify_steps)
    yield counter("ssd:drafter_failures", "Steps that went on without a failed drafter.", counts.drafter_failures)


def _load(counts: EngineMetrics, families: Families) -> Iterator[Metric]:
    counter, gauge = families.counter, families.gauge
    yield counter("vllm:prompt_tokens", "Prompt tokens.", counts.prompt_tokens)
    yield counter("vllm:generation_tokens", "Generated tokens.", counts.generation_tokens)
    queries, hits = counts.prefix_cache_queries, counts.prefix_cache_hits
    yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up among keys and values kept.", queries)
    yield counter("vllm:prefix_cache_hits", "Prompt tokens that were not computed again.", hits)
    yield counter("vllm:num_preemptions", "Requests that made room for more urgent ones.", counts.num_preemptions)
    yield counter("ssd:failed_passes", "Passes that failed and were computed again.", counts.num_failed_passes)
    yield counter("ssd:integrity_violations", "Faults found in the idle engine.", counts.integrity_violations)
    success = CounterMetricFamily(
        "vllm:request_success", "Choices that ended, by reason.", labels=[*LABELS, "finished_reason"]
    )
    finished = dict(counts.num_requests_finished)
    for reason, name in FINISHED_REASONS.items():
        success.add_metric([*families.labels, name], finished.get(reason, 0))
    yield success
    coupled = counts.num_coupled_requests
    yield counter("ssd:coupled_requests", "Choices that ended, drawn with noise that others share.", coupled)
    yield gauge("vllm:num_requests_running", "Choices in a slot.", counts.num_running)
    yield gauge("vllm:num_requests_waiting", "Choices that wait for a slot.", counts.num_waiting)
    yield gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 1 is all.", counts.kv_usage)


def _histograms(counts: EngineMetrics, families: Families) -> Iterator[Metric]:
    found = counts.histograms
    for name, text, histogram in (
        ("request_queue_time_seconds", "From submission to the first slot, of ended choices.", found.queue),
        ("request_prefill_time_seconds", "From the first slot to the first token, of ended choices.", found.prefill),
        ("request_decode_time_seconds", "From the first token to the last, of ended choices.", found.decode),
        ("request_inference_time_seconds", "From the first slot to the last token, of ended choices.", found.inference),
        ("inter_token_latency_seconds", "Between two passes that gave a choice tokens.", found.inter_token),
        ("request_prompt_tokens", "Prompt tokens of an ended choice.", found.prompt_tokens),
        ("request_generation_tokens", "Tokens generated for an ended choice.", found.generation_tokens),
        ("request_params_max_tokens", "Most tokens that an ended choice might have had.", found.max_tokens),
        ("iteration_tokens_total", "Prompt tokens computed and tokens generated in a step.", found.step_tokens),
    ):  # fmt: skip
        yield families.histogram(f"vllm:{name}", text, histogram)
