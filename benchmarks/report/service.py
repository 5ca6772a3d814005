"""What the service costs and withstands: the tables of HTTP, soaks, side channels and connections."""

from __future__ import annotations

from typing import Any

_ATTACKS = {
    "greedy": "which of {prompts} known prompts was asked, from sizes and times of a stream's records; greedy",
    "sampled": "the same, at temperature {temperature}",
    "own key": "was a text asked before, from the time of the attacker's own request; asked under its own key",
    "another key": "the same, asked under another key",
    "cache_salt": "the same, asked under another key with a `cache_salt`",
}


_TRAFFIC = {
    "one": "one client, one token an answer, ms a request",
    "plain": "{clients} clients, no drafts, whole answers, tokens/s",
    "plain-stream": "the same, streams",
    "repeats": "{clients} clients, asked before, drafts, whole answers, tokens/s",
    "repeats-stream": "the same, streams",
}


def http_section(result: dict[str, Any]) -> str:
    """A line a kind of traffic: the engine called directly, the service, and what lies between."""
    lines = ["| traffic | engine | over HTTP | difference | rounds |", "|---|--:|--:|--:|--:|"]
    for row in result["rows"]:
        values = [row[name] for name in ("difference", "least", "most")]
        if row["unit"] == "ms":
            middle, low, high = (f"{value:+.1f} ms" for value in values)
        else:
            middle, low, high = (f"{value:+.0%}" for value in values)
        name = _TRAFFIC[row["kind"]].format(**row)
        lines.append(f"| {name} | {row['engine']:,.1f} | {row['http']:,.1f} | {middle} | {low} ... {high} |")
    parameters = result["parameters"]
    lines += [
        "",
        f"`python -m benchmarks.http`{_where(result)}, {result['model']}: medians of {parameters['rounds']} rounds of "
        f"{parameters['requests']} requests, in turn with the same requests to an engine in the client's process; all "
        "texts are compared. Clients and service share the machine.",
    ]
    return "\n".join(lines)


def soak_section(result: dict[str, Any]) -> str:
    """What was asked for how long, and what became of it."""
    parameters = result["parameters"]
    return (
        f"`python -m benchmarks.soak`{_where(result)}: {parameters['seconds'] / 60:g} minutes, {parameters['clients']} "
        f"clients, {len(result['kinds'])} kinds of requests under three keys. {result['answers']:,} answers "
        f"({result['tokens']:,} tokens) were compared with the engine called directly without drafts: "
        f"{result['changed']} changed, {result['failed']} failed; {result['left']:,} were "
        f"left before they ended. Memory of the last quarter was {result['growth']:.2f} of the second's."
    )


def side_channels_section(result: dict[str, Any]) -> str:
    """A line an attack: its rate without and with the guard, and chance."""
    parameters = result["parameters"]
    found = {(row["what"], row["guard"]): row for row in result["rows"]}
    lines = ["| attack | chance | as streams come | `--obfuscation always` |", "|---|--:|--:|--:|"]
    for what, text in _ATTACKS.items():
        cells = [_rate(found[what, guard]) if (what, guard) in found else "" for guard in ("off", "on")]
        chance = found[what, "off"]["chance"]
        lines.append(f"| {text.format(**parameters)} | {chance:.0%} | {cells[0]} | {cells[1]} |")
    lines += [
        "",
        f"`python -m benchmarks.side_channels`{_where(result)}: the attack of arXiv 2411.01076 on a real server of the "
        f"bundled model; answers of {parameters['max_tokens']} tokens to prompts that were asked before, "
        f"{parameters['train']} traces of each to learn from and {parameters['test']} to guess; one piece of 16 tokens "
        f"every {parameters['interval_s']:g} s. In brackets: intervals of 95 %.",
    ]
    return "\n".join(lines)


def _rate(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return f"{row['rate']:.0%} ({low:.0%} ... {high:.0%})"


def connections_section(result: dict[str, Any]) -> str:
    """A working client's latency, alone and beside others; what each of these takes."""
    lines = [
        f"| beside {result['connections']:,} connections | p50, ms | p99, ms | server's memory for each, KiB |",
        "|---|--:|--:|--:|",
    ]
    names = {"none": "none", "idle": "idle, half of them after an answer", "half a head": "that sent half a head"}
    for row in result["rows"]:
        if row["beside"] in names:
            memory = f"{row['kib_each']:.1f}" if "kib_each" in row else ""
            lines.append(f"| {names[row['beside']]} | {row['p50_ms']:.1f} | {row['p99_ms']:.1f} | {memory} |")
    lines += [
        "",
        f"`python -m benchmarks.connections`{_where(result)}: {result['requests']} completions of one token, one after "
        "the other.",
    ]
    return "\n".join(lines)


def _where(result: dict[str, Any]) -> str:
    environment = result["environment"]
    return f" on {result['date']}, {environment['cpu']}, {environment['cores']} cores"
