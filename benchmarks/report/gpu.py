"""What was measured on a GPU: the marks, and the steps of the large shape."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_check.marks import marks
from benchmarks.report.profile import profile_section


def gpu_section(result: dict[str, Any]) -> str:
    """Of the results of all calls, one over the other."""
    lines = ["| mark | measured | bound | |", "|---|--:|--:|---|"]
    for mark in marks(result):
        word = {None: "not measured", True: "met", False: "**not met**"}[mark.is_met]
        value = "-" if mark.value is None else f"{mark.value:g}"
        lines.append(f"| {mark.name} | {value} | {'<=' if mark.at_most else '>='} {mark.bound:g} | {word} |")
    lines += ["", f"{result['device']}, {result['date']}, torch {result['environment']['versions']['torch']}."]
    large = result.get("speed-large", {})
    if rows := large.get("steps", {}).get("rows"):
        floor = large["steps"]["floor_ms"]
        lines += ["", f"Steps of the {large['shape'].upper()} shape; copying its weights takes {floor:.2f} ms.", ""]
        lines += ["| batch | positions a row | step, ms | pass alone, ms | outside the pass |", "|--:|--:|--:|--:|--:|"]
        lines += [
            f"| {row['batch']} | {row['T']} | {row['step_ms_p50']:.2f} | {row['pass_ms']:.2f} "
            f"| {row['outside_pass_share']:.1%} |"
            for row in rows
        ]
    if rows := result.get("profile", {}).get("rows"):
        parameters = {"context": rows[0]["context"], "rounds": result["parameters"]["rounds"], "profiled": 4}
        facts = {"model": f"{large.get('shape', '8b').upper()} shape", "dtype": "bfloat16", "device": result["device"]}
        said = {"environment": result["environment"], "date": result["date"], "parameters": parameters}
        lines += ["", profile_section({"rows": rows, **facts, **said})]
    return "\n".join(lines)
