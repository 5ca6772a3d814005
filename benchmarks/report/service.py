"""Tables of the service: what it costs and withstands, caches, and fleets of replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.report.engine import Result, said, section
from benchmarks.run import Columns, table

_WHERE = " on {date}, {environment[cpu]}, {environment[cores]} cores"
_REPLICAS = {"random": "any replica", "sticky": "a session stays"}


def http_section(result: Result) -> str:
    """A line a kind of traffic: the engine called directly, the service, and what lies between."""
    traffic = {
        "one": "one client, one token an answer, ms a request",
        "plain": "{clients} clients, no drafts, whole answers, tokens/s",
        "plain-stream": "the same, streams",
        "repeats": "{clients} clients, asked before, drafts, whole answers, tokens/s",
        "repeats-stream": "the same, streams",
    }
    rows = []
    for row in result["rows"]:
        form = "{:+.1f} ms" if row["unit"] == "ms" else "{:+.0%}"
        shown = {name: form.format(row[name]) for name in ("difference", "least", "most")}
        rows.append({**row, **shown, "what": traffic[row["kind"]].format(**row)})
    columns = (
        ("traffic", "{what}"),
        (">engine", "{engine:,.1f}"),
        (">over HTTP", "{http:,.1f}"),
        (">difference", "{difference}"),
        (">rounds", "{least} ... {most}"),
    )
    note = (
        "`python -m benchmarks.http`" + _WHERE + ", {model}: medians of {parameters[rounds]} rounds of "
        "{parameters[requests]} requests, in turn with the same requests to an engine in the client's process; all "
        "texts are compared. Clients and service share the machine."
    )
    return section(columns, rows, said(note, result))


def soak_section(result: Result) -> str:
    """What was asked for how long, and what became of it."""
    note = (
        "`python -m benchmarks.soak`" + _WHERE + ": {minutes:g} minutes, {parameters[clients]} clients, {number} kinds "
        "of requests under three keys. {answers:,} answers ({tokens:,} tokens) were compared with the engine called "
        "directly without drafts: {changed} changed, {failed} failed; {left:,} were left before they ended. Memory of "
        "the last quarter was {growth:.2f} of the second's."
    )
    return said(note, result, minutes=result["parameters"]["seconds"] / 60, number=len(result["kinds"]))


def side_channels_section(result: Result) -> str:
    """A line an attack: its rate without and with the guard, and chance."""
    attacks = {
        "greedy": "which of {prompts} known prompts was asked, from sizes and times of a stream's records; greedy",
        "sampled": "the same, at temperature {temperature}",
        "own key": "was a text asked before, from the time of the attacker's own request; asked under its own key",
        "another key": "the same, asked under another key",
        "cache_salt": "the same, asked under another key with a `cache_salt`",
    }
    rate = "{rate:.0%} ({interval[0]:.0%} ... {interval[1]:.0%})"
    found = {(row["what"], row["guard"]): row for row in result["rows"]}
    rows = [
        {
            "attack": text.format(**result["parameters"]),
            "chance": found[what, "off"]["chance"],
            **{guard: rate.format_map(found[what, guard]) if (what, guard) in found else "" for guard in ("off", "on")},
        }
        for what, text in attacks.items()
    ]
    columns = (
        ("attack", "{attack}"),
        (">chance", "{chance:.0%}"),
        (">as streams come", "{off}"),
        (">`--obfuscation always`", "{on}"),
    )
    note = (
        "`python -m benchmarks.side_channels`" + _WHERE + ": the attack of arXiv 2411.01076 on a real server of the "
        "bundled model; answers of {parameters[max_tokens]} tokens to prompts that were asked before, "
        "{parameters[train]} traces of each to learn from and {parameters[test]} to guess; one piece of 16 tokens "
        "every {parameters[interval_s]:g} s. In brackets: intervals of 95 %."
    )
    return section(columns, rows, said(note, result))


def connections_section(result: Result) -> str:
    """A working client's latency, alone and beside others; what each of these takes."""
    names = {"none": "none", "idle": "idle, half of them after an answer", "half a head": "that sent half a head"}
    rows = [
        {**row, "what": names[row["beside"]], "memory": f"{row['kib_each']:.1f}" if "kib_each" in row else ""}
        for row in result["rows"]
        if row["beside"] in names
    ]
    columns = (
        (f"beside {result['connections']:,} connections", "{what}"),
        (">p50, ms", "{p50_ms:.1f}"),
        (">p99, ms", "{p99_ms:.1f}"),
        (">server's memory for each, KiB", "{memory}"),
    )
    note = "`python -m benchmarks.connections`" + _WHERE + ": {requests} completions of one token, one after the other."
    return section(columns, rows, said(note, result))


def clients_section(result: Result) -> str:
    """A line a client: what it is made of, and every claim about it."""
    rows = [
        {
            "client": name,
            "versions": ", ".join(f"{package} {number}" for package, number in found["versions"].items()),
            "claims": "; ".join([*found["passed"], *(f"**not**: {claim}" for claim in found["failed"])]),
            "passed": len(found["passed"]),
            "all": len(found["passed"]) + len(found["failed"]),
        }
        for name, found in result["clients"].items()
    ]
    columns = (
        ("client", "{client}"),
        ("versions", "{versions}"),
        ("what it did", "{claims}"),
        (">claims that hold", "{passed} of {all}"),
    )
    note = (
        "`make bench-clients`" + _WHERE + ": one server of the bundled model with an API key, all clients as they are "
        "published."
    )
    return section(columns, rows, said(note, result))


def faults_section(result: Result) -> str:
    """A line a fault, the sum, and what it was measured on."""
    names = ("right", "interrupted", "failed", "changed", "promised", "lost", "twice", "elsewhere")
    titles = ("answers right", "cut off", "failed", "changed", "notes promised", "lost", "twice", "elsewhere")
    rows = []
    for row in result["rows"]:
        skipped = {**dict.fromkeys(names, ""), "right": f"skipped: {row.get('skipped')}"}
        shown = skipped if row.get("skipped") else {name: f"{row[name]:,}" for name in names}
        rows.append({"fault": row["fault"], **shown})
    rows.append({"fault": "**all**", **{name: f"**{result[name]:,}**" for name in names}})
    columns = (("fault", "{fault}"), *((f">{title}", f"{{{name}}}") for title, name in zip(titles, names, strict=True)))
    note = (
        "`python -m benchmarks.faults` on {date}: real servers of the bundled model under {parameters[clients]} "
        "clients, {environment[cpu]}, {environment[cores]} cores, {parameters[rounds]} round of each fault and "
        "{parameters[combinations]} combinations from seed {parameters[seed]}. Every answer is compared with the same "
        "model without speculation. Cut off: the server was killed while it answered. A note is a text that was "
        "acknowledged and has to be found afterwards, once, in its namespace."
    )
    return section(columns, rows, said(note, result))


def fleet_faults_section(result: Result) -> str:
    """A line a round, the sum, and what it was measured on."""
    names = ("right", "interrupted", "failed", "changed", "deaf")
    titles = ("answers right", "cut off", "failed", "changed", "not shared in 30 s")
    rows = [
        {
            "round": row["faults"],
            **{name: f"{row[name]:,}" for name in names},
            "shared": "" if row["sharing_back_s"] is None else f"{row['sharing_back_s']:.1f} s",
        }
        for row in result["rows"]
        if row["sharing_back_s"] is not None or row["deaf"]
    ]
    rows.append({"round": "**all**", **{name: f"**{result[name]:,}**" for name in names}, "shared": ""})
    counts = ((f">{title}", f"{{{name}}}") for title, name in zip(titles, names, strict=True))
    columns = (("round", "{round}"), *counts, (">shared again after", "{shared}"))
    note = (
        "`python -m benchmarks.fleet_faults` on {date}: {parameters[servers]} real servers of the bundled model, a "
        "proxy between each and one Redis, two tenants, {environment[cpu]}, {environment[cores]} cores, "
        "{parameters[rounds]} rounds from seed {parameters[seed]}. A round is over when what each server learned is "
        "drafted by all others. Closed in order afterwards, the servers' directories were searched for all "
        "{promised:,} notes that were promised: {lost} lost, {twice} twice, {elsewhere} in another tenant's cache."
    )
    if result.get("steps") is not None:
        note += (
            " With a healthy Redis, on which others write {steps[others_tokens_per_s]:,} tokens/s, an answer took "
            "{steps[ratio]:.3f} times as long as without one ({steps[interval][0]:.3f} ... {steps[interval][1]:.3f}, "
            "{steps[pairs]} pairs)."
        )
    return section(columns, rows, said(note, result))


def building_section(result: Result) -> str:
    """Rates end to end, from the start of the process to the directory."""
    kinds = {name: f"token ids, `.{name}`" for name in ("npy", "parquet", "jsonl")} | {
        "text": "text, `.jsonl`, tokenised"
    }
    rows = [{**row, "input": kinds[row["kind"]]} for row in result["rows"]]
    columns = (
        ("input", "{input}"),
        (">processes", "{jobs}"),
        (">tokens", "{tokens:,}"),
        (">seconds", "{seconds:,.0f}"),
        (">tokens/s", "{tokens_per_s:,}"),
        (">tokens/s a core", "{tokens_per_core_s:,}"),
        (">peak, bytes a token", "{peak_bytes_per_token:.1f}"),
    )
    note = (
        "`python -m benchmarks.building`" + _WHERE + ": from the start of the command to the finished directory; a "
        "core's rate by processor time; the peak of the process with the most private memory, less what a build of a "
        "few tokens takes, over its largest segment. {checked} lookups were compared with a slow count."
    )
    return section(columns, rows, said(note, result, checked=sum(row["lookups_checked"] for row in rows)))


def joining_section(result: Result) -> str:
    """A row a figure."""
    rows = [
        ("joining {tokens:.0f}M tokens: first useful draft", "{first_draft_s:.2f} s"),
        ("all of it", "{all_s:.1f} s"),
        ("accepted a step, of the oldest's", "{share:.1%}"),
    ]
    if "push_s" in result:
        rows += [
            ("pushing {moved:.0f}M tokens", "{push_s:.1f} s"),
            ("bytes sent a token", "{sent:.2f}"),
            ("until a server searches them", "{searched_s:.1f} s"),
            ("pulling them", "{pull_s:.1f} s"),
        ]
    moved = result.get("pushed_tokens", 1)
    more = {
        "tokens": result["namespace_tokens"] / 1e6,
        "share": result["accepted_joined"] / result["accepted_oldest"],
        "moved": moved / 1e6,
        "sent": result.get("pushed_bytes", 0) / moved,
    }
    shown = [{"what": said(what, result, **more), "here": said(here, result, **more)} for what, here in rows]
    note = (
        "`python -m benchmarks.joining`, {environment[cpu]}, {environment[cores]} cores, made text, both replicas and "
        "Redis on this machine."
    )
    return section((("what", "{what}"), (">here", "{here}")), shown, said(note, result))


def index_section(runs: Sequence[Result]) -> str:
    """One column a size, then the peers of the run that asked them."""
    figures = (
        ("bytes a token at rest, all included", "bytes_per_token", "{:.1f}"),
        ("propose a draft of 10, us p50", "propose_us_p50", "{:.0f}"),
        ("p99", "propose_us_p99", "{:.0f}"),
        ("new text can be drafted after, ms p99", "freshness_ms_p99", "{:.1f}"),
        ("upkeep at 10,000 tokens/s, share of a core", "maintenance_core_share", "{:.1%}"),
        ("propose while merging, us p99", "propose_us_p99_merging", "{:.0f}"),
        ("reopened from disk, s to the first draft", "reopen_s", "{:.2f}"),
    )

    def shown(run: Result, key: str, form: str) -> str:
        # Static files are mapped and built elsewhere: what the process grew by says nothing about their tokens.
        is_said = run.get(key) is not None and not (key == "bytes_per_token" and run["parameters"]["static"])
        return form.format(run[key]) if is_said else "-"

    rows = [{"label": label, "by": [shown(run, key, form) for run in runs]} for label, key, form in figures]
    columns = (("tokens", "{label}"), *((f">{_size(run)}", f"{{by[{place}]}}") for place, run in enumerate(runs)))
    note = (
        "`python -m benchmarks.index`, {environment[cpu]}, {environment[cores]} cores, made text of "
        "{parameters[vocab]:,} ids, one thread, called from Python; contexts of 64 tokens never asked before, half of "
        "them present, of the other half only the last 1 to 10 tokens; on what ingest leaves behind."
    )
    parts = ["\n".join(table(columns, rows)), said(note, runs[0])]
    if (compared := next((run for run in reversed(runs) if run["peers"]), None)) is not None:
        parts.insert(1, _peers(compared))
    return "\n\n".join(parts)


def stored_tokens(run: Result) -> int:
    """Ring and static segments together."""
    return int(run["tokens"]) + int(run["parameters"]["static"])


def _size(run: Result) -> str:
    static = int(run["parameters"]["static"])
    text = f"{stored_tokens(run) / 1e6:.0f} M"
    return f"{text}, {static / 1e6:.0f} M of it static files" if static else text


def _peers(run: Result) -> str:
    """Rows of one comparison; ratios are within rounds of the same run."""
    rows = []
    for name, figures in run["peers"].items():
        if "propose_us_present_p50" in figures:
            held = figures.get("bytes_per_token")
            ratios = [figures.get(f"propose_{kind}_times_ours") for kind in ("present", "broken")]
            faster = ["" if ratio is None else f"{ratio:.1f}x" for ratio in ratios]
            rows.append({**figures, "name": name, "held": f"{held:.0f}" if held else "-", "faster": faster})
    columns = (
        ("", "{name}"),
        (">bytes a token", "{held}"),
        (">present, us p50", "{propose_us_present_p50:.0f}"),
        (">ours faster by", "{faster[0]}"),
        (">broken, us p50", "{propose_us_broken_p50:.0f}"),
        (">ours faster by", "{faster[1]}"),
    )
    tokens = run["parameters"]["peer_tokens"] / 1e6
    head = f"Beside others on the same {tokens:.0f} M tokens, medians of rounds in turn:"
    note = (
        "Those without stored bytes look at the request's own text, here 64 tokens, and at nothing else. Below 1x ours "
        "is the slower one."
    )
    return f"{head}\n\n{section(columns, rows, note)}"


def shares_section(result: Result) -> str:
    """The picture, the table of shares, the shares by trace, and how it was simulated."""
    parameters, rows = result["parameters"], result["rows"]
    lags = [*parameters["lags_s"], None]
    together = [row for row in rows if row["judges"] == "together" and row["kind"] != "one"]
    by_size = [
        {
            "replicas": replicas,
            "routing": words,
            "by": [
                row["share"]
                for lag in lags
                for row in together
                if (row["replicas"], row["routing"], row["lag_s"]) == (replicas, routing, lag)
            ],
        }
        for replicas in sorted({row["replicas"] for row in together})
        for routing, words in _REPLICAS.items()
    ]
    titles = [f">log, {lag:g} s" for lag in parameters["lags_s"]] + [">each its own cache"]
    columns: Columns = (
        (">replicas", "{replicas}"),
        ("routing", "{routing}"),
        *((title, f"{{by[{place}]:.1%}}") for place, title in enumerate(titles)),
    )
    ones = [row["accepted_per_step"] for row in rows if row["kind"] == "one"]
    note = (
        "`python -m benchmarks.fleet` on {date}: {traces} recorded traces mixed, tokenizer {tokenizer}; every replica "
        "runs {parameters[concurrency]:g} requests of {parameters[tokens_per_s]:g} tokens/s, so that more replicas are "
        "asked more at once; turns of a session come {parameters[think_s]:g} s (mean) after the answer before; "
        "{parameters[scored]:.0%} of the sessions are drafted for, all are learned. One cache accepts {least:.2f} to "
        "{most:.2f} drafted tokens a step, the target's own not counted."
    )
    if "whole" in result:
        note += (
            " {whole[replicas]} replicas that store everything, through the reader and the writer that serve, accept "
            "{whole[accepted_per_step][0]:.4f} a step on {whole[requests]:,} requests where the shortcut accepts "
            "{whole[accepted_per_step][1]:.4f}."
        )
    tokenizer = parameters["tokenizer"] or "of the bundled model"
    text = said(note, result, traces=len(parameters["traces"]), tokenizer=tokenizer, least=min(ones), most=max(ones))
    figure = "![accepted tokens per step as a share of one cache's, over replicas](../benchmarks/results/fleet.png)"
    return "\n\n".join([figure, "\n".join(table(columns, by_size)), *_by_trace(together), *_judged(rows), text])


def _by_trace(together: Sequence[Result]) -> list[str]:
    """Of the largest fleet up to 64 at 0.5 s."""
    found = [row for row in together if row["routing"] == "random" and row["replicas"] <= 64]
    most = max((row["replicas"] for row in found), default=0)
    log = next((row for row in found if row["replicas"] == most and row["lag_s"] == 0.5), None)
    alone = next((row for row in found if row["replicas"] == most and row["kind"] == "isolated"), None)
    if log is None or alone is None:
        return []
    rows = [
        {"trace": name, "log": share, "own": alone["trace_shares"][name]} for name, share in log["trace_shares"].items()
    ]
    columns = (("trace", "{trace}"), (">log", "{log:.1%}"), (">its own", "{own:.1%}"))
    head = f"By trace, {most} replicas, any replica: the log at 0.5 s, and each its own cache."
    return [head, "\n".join(table(columns, rows))]


def _judged(rows: Sequence[Result]) -> list[str]:
    found = [row for row in rows if row["judges"] == "each"]
    if not found:
        return []
    shares = " and ".join(f"{row['share']:.1%} ({_REPLICAS[row['routing']]})" for row in found)
    return [
        f"Above, all replicas learn together how likely a draft is. Where each of {found[0]['replicas']} learns that "
        f"from its own scored requests alone, the log at {found[0]['lag_s']:g} s reaches {shares}: less than in "
        "service, where every request is drafted for and what was learned is published with the text."
    ]


def latency_section(result: Result) -> str:
    """From an append on one replica to a draft on another, and what that costs an engine."""
    figures: dict[str, str] = {
        "learned on one, drafted on another, ms p50": "{latency[p50_ms]:.0f}",
        "p99": "{latency[p99_ms]:.0f}",
        "most": "{latency[most_ms]:.0f}",
    }
    if "receiving" in result:
        figures["CPU of receiving an entry, us: one a reply, {receiving[several]} a reply"] = (
            "{receiving[us_of_one]:.0f}, {receiving[us_of_several]:.0f}"
        )
    if "steps" in result:
        interval = "{steps[%s]:.3f} ({steps[%s_95][0]:.3f} ... {steps[%s_95][1]:.3f})"
        figures["engine step while receiving, over not"] = interval.replace("%s", "ratio")
        figures["by CPU time of all the process"] = interval.replace("%s", "ratio_by_cpu_time")
    if "servers" in result:
        what = "passes for {servers[prompts]} answers of {servers[max_tokens]} tokens: first server, then another"
        figures[what] = "{servers[passes_first]}, {servers[passes_second]}"
    rows = [{"what": said(what, result), "here": said(here, result)} for what, here in figures.items()]
    note = (
        "`python -m benchmarks.sharing_latency` on {date}: {latency[replicas]} replicas, "
        "{parameters[tokens_per_second]:,.0f} tokens/s in all, {latency[counted]:,} times a text was found by another "
        "replica, each looked for every 2 ms; {environment[cpu]}, {environment[cores]} cores for all of them and "
        "Redis. The step is compared in pairs: as much is said, into the namespace that is followed or into another."
    )
    return section((("", "{what}"), (">", "{here}")), rows, said(note, result))


PLANNED_SIZES: Final = (10**9, 10**11)
_SEGMENT_TOKENS: Final = 1 << 24
_CORES: Final = 16
"""Of a machine."""
_CORE_HOUR: Final = 0.05
"""US dollars, as clouds ask for one of a machine with 4 GB for each core; an assumption."""
_DISK_MONTH: Final = 0.08
"""US dollars for 10^9 bytes of network SSD; an assumption."""


def plan_section(index: Result, building: Result | None) -> str:
    """A plan on paper for larger caches: machines, hours, memory, disk and cost, from the rates of one core."""
    memory, at_rest = float(index["bulk_peak_bytes_per_token"]), float(index["segment_bytes_per_token"])
    rates = {"token ids": float(index["build_tokens_per_s"])}
    source = "`python -m benchmarks.index` (sorting and writing alone)"
    if building is not None:
        by_kind: Mapping[str, Any] = {row["kind"]: row for row in building["rows"] if row["jobs"] == 1}
        for name, kind in (("token ids", "npy"), ("text", "text")):
            if kind in by_kind:
                rates[name] = float(by_kind[kind]["tokens_per_core_s"])
        if "npy" in by_kind:
            memory = max(memory, float(by_kind["npy"]["peak_bytes_per_token"]))
        source = "`python -m benchmarks.building` (end to end)"
    rows = []
    for size in PLANNED_SIZES:
        disk_gb, machines = at_rest * size / 1e9, max(1, size // 10**10)
        for kind, rate in rates.items():
            hours = size / rate / 3600
            rows.append(
                {
                    "size": size,
                    "kind": kind,
                    "hours": hours,
                    "machines": machines,
                    "each": hours / machines / _CORES,
                    "memory": _CORES * memory * _SEGMENT_TOKENS / 1e9,
                    "disk": disk_gb,
                    "once": hours * _CORE_HOUR,
                    "monthly": disk_gb * _DISK_MONTH,
                }
            )
    columns = (
        (">tokens", "{size:.0e}"),
        ("from", "{kind}"),
        (">core hours", "{hours:,.2f}"),
        (">machines", "{machines}"),
        (">hours", "{each:,.3f}"),
        (">memory each", "{memory:.1f} GB"),
        (">disk", "{disk:,.0f} GB"),
        (">once", "${once:,.2f}"),
        (">a month", "${monthly:,.2f}"),
    )
    per_segment_us = float(index["propose_us_p50"]) / float(index["segments"])
    few, many = (size // _SEGMENT_TOKENS for size in PLANNED_SIZES)
    note = (
        f"Rates: {source}, {', '.join(f'{rate:,.0f} tokens/s a core from {kind}' for kind, rate in rates.items())}; "
        f"{at_rest:.2f} bytes a token at rest, {memory:.1f} while a segment of {_SEGMENT_TOKENS / 1e6:.1f} M tokens is "
        f"sorted, one on each of a machine's {_CORES} cores. Segments are independent, so machines share nothing but "
        f"the manifest at the end; reading the corpus is not counted. Assumed: ${_CORE_HOUR:.2f} a core hour, "
        f"${_DISK_MONTH:.2f} a month for a GB of SSD. A lookup asks every segment ({per_segment_us:.1f} us each on "
        f"{index['segments']} of them): {few} segments are fine, {many:,} would take "
        f"{many * per_segment_us / 1000:.0f} "
        "ms. So 10^11 tokens are to be built as segments of the most there may be (2^29 tokens, 32 times as much "
        "memory while sorted) or, better, as a namespace for each domain, tenant or language that asks only its own."
    )
    return section(columns, rows, note)
