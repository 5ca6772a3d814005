"""Tables of the service: what it costs and withstands, caches, and fleets of replicas."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report.engine import Result, said, section
from benchmarks.run import table

_WHERE = " on {date}, {environment[cpu]}, {environment[cores]} cores"


def http_section(result: Result) -> str:
    """A line a kind of traffic: the engine called directly, the service, and what lies between."""
    traffic = {
        "one": "one client, one token an answer, ms a request",
        "plain": "{clients} clients, no drafts, whole answers, tokens/s",
        "plain-stream": "the same, streams",
    }
    rows = []
    for row in (row for row in result["rows"] if row["kind"] in traffic):
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
        "{parameters[requests]} requests, in turn with the same to an engine in the client's process, which share the "
        "machine; all texts are compared."
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


def clients_section(result: Result) -> str:
    """A line a client: what it is made of, and how many of the claims about it hold (benchmarks/clients)."""
    rows = [
        {
            "client": name,
            "versions": ", ".join(f"{package} {number}" for package, number in found["versions"].items()),
            "failed": "; ".join(found["failed"]),
            "passed": len(found["passed"]),
            "all": len(found["passed"]) + len(found["failed"]),
        }
        for name, found in result["clients"].items()
    ]
    columns = (
        ("client", "{client}"),
        ("versions", "{versions}"),
        (">claims that hold", "{passed} of {all}"),
        ("which do not", "{failed}"),
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
        rows.append({"fault": row.get("fault") or row["faults"], **shown})
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
        "`python -m benchmarks.faults --servers 3` on {date}: {parameters[servers]} real servers of the bundled model, "
        "a proxy between each and one Redis, two tenants, {environment[cpu]}, {environment[cores]} cores, "
        "{parameters[rounds]} rounds from seed {parameters[seed]}. A round is over when what each server learned is "
        "drafted by all others. Closed in order afterwards, the servers' directories were searched for all "
        "{promised:,} notes that were promised: {lost} lost, {twice} twice, {elsewhere} in another tenant's cache."
    )
    return section(columns, rows, said(note, result))


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
        "{parameters[vocab]:,} ids, one thread; contexts of 64 tokens never asked before, half of them present, of the "
        "other half only the last 1 to 10 tokens."
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
        "Those without stored bytes look at the request's own text alone, here 64 tokens. Below 1x ours is the slower."
    )
    return f"{head}\n\n{section(columns, rows, note)}"
