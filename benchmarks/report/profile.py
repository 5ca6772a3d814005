"""Where a step's time goes."""

from __future__ import annotations

from typing import Any


def profile_section(result: dict[str, Any]) -> str:
    """A row for each batch and number of positions."""
    on_device = "device_busy_ms" in result["rows"][0]
    middle = ("device busy", "between launches", "waits for the host") if on_device else ("in operators", "outside")
    lines = [
        f"| batch | positions a row | step, ms | {' | '.join(middle)} | most of it | the host's parts of a step |",
        "|--:|--:|--:|" + "--:|" * len(middle) + "---|---|",
    ]
    for row in result["rows"]:
        names = ("device_busy_ms", "launch_gaps_ms", "waits_for_host_ms")
        shares = [row[name] for name in (names if on_device else ("operators_ms", "outside_operators_ms"))]
        cells = " | ".join(f"{share / row['step_ms']:.0%}" for share in shares)
        most = ", ".join(f"{name} {ms / row['step_ms']:.0%}" for name, ms in list(row["groups_ms"].items())[:3])
        host = ", ".join(f"{name} {ms:.2f}" for name, ms in row["phases_ms"].items() if ms >= 0.005)
        step = row["unprofiled_step_ms_p50"]
        lines.append(f"| {row['batch']} | {row['T']} | {step:.2f} | {cells} | {most} | {host} |")
    environment, parameters = result["environment"], result["parameters"]
    lines += [
        "",
        f"`python -m benchmarks.profile`: {result['model']}, {result['dtype'].removeprefix('torch.')}, "
        f"{result['device'] if on_device else environment['cpu']}, {result['date']}, context {parameters['context']}; "
        f"medians of {parameters['rounds']} steps without the profiler, shares and parts (ms) of "
        f"{parameters['profiled']} under it. Drafts are looked up as always, and then the model's own are verified.",
    ]
    return "\n".join(lines)
