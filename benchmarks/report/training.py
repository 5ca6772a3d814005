"""Tables of training: draft heads, and rollouts with shared noise."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.report.engine import Result, said, section, spread
from benchmarks.run import Columns, table


def heads_section(run: Result) -> str:
    """One row a head and way of drafting: share of chains accepted to each depth, tokens a pass."""
    kinds = {"eagle3": "EAGLE-3", "medusa": "Medusa, 4 heads"}
    ways = {
        "most_probable": "most probable token",
        "outside_loops": "most probable token, outside loops",
        "same_noise": "with the target's noise",
    }

    def sampled(text: Result) -> str:
        return f"temperature {text['temperature']}" if text["temperature"] else "greedy"

    rows = [
        {**text[key], "head": kinds[result["kind"]], "text": sampled(text), "drafted": drafted}
        for result in run["results"]
        for text in result["held_out"]
        for key, drafted in ways.items()
        if key in text
    ]
    columns = (
        ("head", "{head}"),
        ("text", "{text}"),
        ("drafted", "{drafted}"),
        *(
            (f">{'to depth ' if place == 0 else ''}{place + 1}", f"{{accepted_to_depth[{place}]:.1%}}")
            for place in range(4)
        ),
        (">tokens accepted", "{accepted:.2f}"),
    )
    of_each = "\n".join(
        f"- {kinds[result['kind']]}: {result['steps']} steps, {result['tokens'] / 1e6:.2f} M tokens read in "
        f"{result['seconds'] / 60:.0f} minutes on {result['threads']} threads that others kept busy, "
        f"{result['bytes'] / 1e6:.2f} MB; one pass takes {result['head_pass_ms']:.2f} ms of one core, the target's "
        f"{result['target_pass_ms']:.2f} ms"
        for result in run["results"]
    )
    loops = " and ".join(
        f"{text['loop_share']:.0%} of the {'sampled' if text['temperature'] else 'greedy'} tokens"
        for text in run["results"][0]["held_out"]
    )
    note = (
        "{of_each}\n\nMeasured on {date}, {environment[cpu]}, by `python -m benchmarks.head_training` from what was "
        "saved; times on one thread. {parameters[rows]} greedy and {parameters[rows]} sampled texts behind prompts of "
        "files that nothing was trained on, a chain at every position: {loops} lie inside loops."
    )
    return section(columns, rows, said(note, run, of_each=of_each, loops=loops))


def rollouts_section(results: Sequence[Result]) -> str:
    """Of each result two tables: how many times less than speculation off, and rewards, by epoch."""
    rows = {
        "passes": "passes for a token",
        "row_passes": "passes for a token, each row counted",
        "seconds": "time of generating",
        "cpu_s": "CPU time of generating",
    }
    parts = []
    for result in results:
        epochs = result["parameters"]["epochs"]
        titles = [f">epoch {epoch}" for epoch in range(1, epochs + 1)]
        less = [(f"{title}", spread(f"by[{place}]")) for place, title in enumerate([*titles, ">all"])]
        columns: Columns = (("times less than speculation off", "{what}"), *less)
        saved = [{"what": what, "by": result["over_off"][key]} for key, what in rows.items()]
        reward = [(title, f"{{by[{place}]}}") for place, title in enumerate([*titles, ">after, other noise"])]
        rewards = [
            {"name": name, "by": [_rewards(each) for each in (*zip(*of["rewards"], strict=True), of["rewards_after"])]}
            for name, of in result["contenders"].items()
        ]
        note = said(
            "{date}: {model}, {environment[cpu]}, {environment[cores]} cores, {parameters[seeds]} seeds. The answers "
            "of the first coupled run and those of its noise without speculation {same}. Taking weights over: "
            "{ms:.0f} ms.",
            result,
            same="are the same" if result["same_answers_without_speculation"] else "differ",
            ms=1000 * result["contenders"]["coupled"]["loading_s"],
        )
        parts += [
            f"Learning rate {result['parameters']['learning_rate']:g}:",
            "\n".join(table(columns, saved)),
            section((("mean reward", "{name}"), *reward), rewards, note),
        ]
    note = (
        "`python -m benchmarks.rollouts`: GRPO, {parameters[prompts]} prompts of {parameters[num_generations]} samples "
        "of at most {parameters[max_tokens]} tokens, {parameters[prompts_per_step]} prompts a step, "
        "{parameters[slots]} slots, temperature {parameters[temperature]}; reward 1 where something is returned. "
        "Medians (least ... most) over seeds, of rewards means. Contenders with one figure ran with the first seed."
    )
    return "\n\n".join([*parts, said(note, results[0])])


def _rewards(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{fmean(values):.3f} ({min(values):.3f} ... {max(values):.3f})"
