"""Fleets that share one log: what they draft, what breaks first, how soon they know, and plans for large caches."""

from __future__ import annotations

from typing import Any

from benchmarks.fleet.limits import CACHE_HOLDS_S, RECEIVER_CORES, REDIS_CORES, REDIS_OUT_MB_S

_LIMITS = {
    "cache_holds": "a text nobody says again stays less than {minutes:.0f} minutes in a cache of the default size",
    "receiver": "receiving takes more than {receiver:.0%} of a core of each replica",
    "redis_cpu": "Redis is busy for more than {redis:.0%} of its one core",
    "redis_network": "Redis sends more than {network:,.0f} MB/s",
}
_ROUTING = {"random": "any replica", "sticky": "a session stays"}


def shares_section(result: dict[str, Any]) -> str:
    """The picture, the table of shares, the mark, and how it was simulated."""
    parameters, rows = result["parameters"], result["rows"]
    lags = parameters["lags_s"]
    lines = [
        "![accepted tokens per step as a share of one cache's, over replicas](../benchmarks/results/fleet.png)",
        "",
        "| replicas | routing | " + " | ".join(f"log, {lag:g} s" for lag in lags) + " | each its own cache |",
        "|--:|---|" + "--:|" * (len(lags) + 1),
    ]
    together = [row for row in rows if row["judges"] == "together" and row["kind"] != "one"]
    for replicas in sorted({row["replicas"] for row in together}):
        for routing, said in _ROUTING.items():
            here = {
                row["lag_s"]: row["share"]
                for row in together
                if row["replicas"] == replicas and row["routing"] == routing
            }
            cells = [f"{here[lag]:.1%}" for lag in [*lags, None]]
            lines.append(f"| {replicas} | {said} | " + " | ".join(cells) + " |")
    lines += ["", *_by_trace(rows), *_judged(rows)]
    whole = result["whole"]
    ones = {row["replicas"]: row["accepted_per_step"] for row in rows if row["kind"] == "one"}
    lines += [
        f"`python -m benchmarks.fleet` on {result['date']}: {len(parameters['traces'])} recorded traces "
        "mixed, tokenizer "
        f"{parameters['tokenizer'] or 'of the bundled model'}; every replica runs "
        f"{parameters['concurrency']:g} requests "
        f"of {parameters['tokens_per_s']:g} tokens/s, so that more replicas are asked more at once; turns of a session "
        f"come {parameters['think_s']:g} s (mean) after the answer before; {parameters['scored']:.0%} of the sessions "
        f"are drafted for, all are learned. One cache accepts {min(ones.values()):.2f} to "
        f"{max(ones.values()):.2f} drafted "
        f"tokens a step, the target's own not counted. {whole['replicas']} replicas that store everything, through the "
        f"reader and the writer that serve, accept {whole['accepted_per_step'][0]:.4f} a step on {whole['requests']:,} "
        f"requests where the shortcut accepts {whole['accepted_per_step'][1]:.4f}.",
    ]
    return "\n".join(lines)


def _by_trace(rows: list[dict[str, Any]]) -> list[str]:
    """Of the largest fleet up to 64 at 0.5 s."""
    found = [
        row for row in rows if row["routing"] == "random" and row["judges"] == "together" and row["replicas"] <= 64
    ]
    most = max((row["replicas"] for row in found), default=0)
    log = next((row for row in found if row["replicas"] == most and row["lag_s"] == 0.5), None)
    alone = next((row for row in found if row["replicas"] == most and row["kind"] == "isolated"), None)
    if log is None or alone is None:
        return []
    return [
        f"By trace, {most} replicas, any replica: the log at 0.5 s, and each its own cache.",
        "",
        "| trace | log | its own |",
        "|---|--:|--:|",
        *(
            f"| {name} | {share:.1%} | {alone['trace_shares'][name]:.1%} |"
            for name, share in log["trace_shares"].items()
        ),
        "",
    ]


def _judged(rows: list[dict[str, Any]]) -> list[str]:
    found = [row for row in rows if row["judges"] == "each"]
    if not found:
        return []
    shares = " and ".join(f"{row['share']:.1%} ({_ROUTING[row['routing']]})" for row in found)
    return [
        f"Above, all replicas learn together how likely a draft is. Where each of {found[0]['replicas']} "
        "learns that from "
        f"its own scored requests alone, the log at {found[0]['lag_s']:g} s reaches {shares}: less than in "
        "service, where "
        "every request is drafted for and what was learned is published with the text.",
        "",
    ]


def limits_section(result: dict[str, Any]) -> str:
    """What a fleet's log costs by its size, and which limit is met first."""
    lines = [
        "| replicas | entries/s | commands/s a replica | receives, kB/s | a core of each | Redis: "
        "commands/s | of its core "
        "| MB/s out | log holds, s | cache holds, s |",
        "|--:|" + "--:|" * 9,
    ]
    for load in result["loads"]:
        cells = [
            f"{load['log_entries_per_s']:,.1f}",
            f"{load['replica_commands_per_s']:,.1f}",
            f"{load['replica_read_kb_per_s']:,.0f}",
            f"{load['replica_receive_cores']:.2%}",
            f"{load['redis_commands_per_s']:,.0f}",
            f"{load['redis_cores']:.1%}",
            f"{load['redis_out_mb_per_s']:,.1f}",
            f"{load['log_holds_s']:,.0f}",
            f"{load['cache_holds_s']:,.0f}",
        ]
        lines.append(f"| {load['replicas']:.0f} | " + " | ".join(cells) + " |")
    values = {
        "minutes": CACHE_HOLDS_S / 60,
        "receiver": RECEIVER_CORES,
        "redis": REDIS_CORES,
        "network": REDIS_OUT_MB_S,
    }
    lines += ["", "What breaks first, and the most replicas before it does:", ""]
    lines += [f"1. {most:,}: {_LIMITS[name].format(**values)}." for name, most in result["limits"].items()]
    unit, redis = result["unit"], result["redis"]
    lines += [
        "",
        f"Measured: an entry of {result['whole']['tokens_of_an_entry']:.0f} tokens is "
        f"{unit['read_bytes']:.0f} bytes to "
        f"each reader and takes it {1e6 * unit['receive_s']:.0f} us of CPU, sealing and merging "
        f"included; redis-server takes {redis['write_us']:.0f} us for "
        f"one written, {redis['reply_us']:.0f} us a reply and {redis['delivered_us']:.2f} us for each entry in it (six "
        f"loads with up to {max(run['readers'] for run in redis['runs'])} blocked readers; the costs fit them within "
        f"{redis['fit_error']:.0%}). A replica writes {unit['entries']:.2f} entries/s. Without the reader's "
        "pause of 50 ms "
        f"after a reply Redis' core would be full at {result['limits_without_gathering']['redis_cpu']:,} replicas.",
    ]
    return "\n".join(lines)


def latency_section(result: dict[str, Any]) -> str:
    """From an append on one replica to a draft on another, and what that costs an engine."""
    found, parameters = result["latency"], result["parameters"]
    environment = result["environment"]
    lines = [
        "| | |",
        "|---|--:|",
        f"| learned on one, drafted on another, ms p50 | {found['p50_ms']:.0f} |",
        f"| p99 | {found['p99_ms']:.0f} |",
        f"| most | {found['most_ms']:.0f} |",
    ]
    if (taken := result.get("receiving")) is not None:
        lines.append(
            f"| CPU of receiving an entry, us: one a reply, {taken['several']} a reply | "
            f"{taken['us_of_one']:.0f}, {taken['us_of_several']:.0f} |"
        )
    if (steps := result.get("steps")) is not None:
        least, most = steps["ratio_95"]
        lines.append(f"| engine step while receiving, over not | {steps['ratio']:.3f} ({least:.3f} ... {most:.3f}) |")
        least, most = steps["ratio_by_cpu_time_95"]
        ratio = steps["ratio_by_cpu_time"]
        lines.append(f"| by CPU time of all the process | {ratio:.3f} ({least:.3f} ... {most:.3f}) |")
    if (servers := result.get("servers")) is not None:
        lines.append(
            f"| passes for {servers['prompts']} answers of {servers['max_tokens']} tokens: first server, then another "
            f"| {servers['passes_first']}, {servers['passes_second']} |"
        )
    lines += [
        "",
        f"`python -m benchmarks.sharing_latency` on {result['date']}: {found['replicas']} replicas, "
        f"{parameters['tokens_per_second']:,.0f} tokens/s in all, {found['counted']:,} times a text was "
        "found by another "
        f"replica, each looked for every 2 ms; {environment['cpu']}, {environment['cores']} cores for all of them and "
        "Redis. The step is compared in pairs: as much is said, into the namespace that is followed or into another.",
    ]
    return "\n".join(lines)
