"""An evaluation as one self-contained HTML file: a figure of the speed-up, the assumptions and all tables."""

from __future__ import annotations

import html
import io
import warnings
from pathlib import Path
from string import Template
from typing import Any, Final

from cache_builder.evaluation.report import Evaluation, format_sampling, headline, summary
from cache_builder.opened_cache import escape_control_characters
from ssd.errors import ConfigError

_MAX_CURVES: Final = 7
_PAGE: Final = Template("""\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>ssd-cache evaluate: $title</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
svg { width: 100%; height: auto }
h1 { font-size: 1.5rem }
pre { white-space: pre-wrap; font-size: 13px; line-height: 1.35 }
</style>
<h1>$title</h1>
$figure
<h2>Assumptions</h2>
<ul>
$assumptions
</ul>
<h2>All figures</h2>
<pre>
$summary
</pre>
</html>
""")


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("--html needs matplotlib: pip install matplotlib") from None


def write_page(evaluation: Evaluation, path: Path) -> None:
    """Write the report of an evaluation as an HTML file, with text from logs escaped. Raises OSError."""
    assumptions = [f"Costs of a forward pass: {evaluation['cost']['source']}", *evaluation["unknown"]]
    path.write_text(
        _PAGE.substitute(
            title=_escape(headline(evaluation)),
            figure=_draw_figure(evaluation),
            assumptions="\n".join(f"<li>{_escape(each)}</li>" for each in assumptions),
            summary=html.escape(summary(evaluation)),
        ),
        encoding="utf-8",
    )


def _escape(text: str) -> str:
    return html.escape(escape_control_characters(text))


def _draw_figure(evaluation: Evaluation) -> str:
    """Return a figure as an SVG element: the speed-up in each tenth of the log, for all requests and for each class."""
    import matplotlib
    from matplotlib.figure import Figure

    curves: list[tuple[str, list[dict[str, Any]], str]] = [("all requests", evaluation["growth"], "requests")]
    curves += [(f"class {each['name']}", each["growth"], "requests") for each in evaluation["classes"][:_MAX_CURVES]]
    for way in (evaluation.get("measured") or {"temperatures": ()})["temperatures"]:
        curves.append((f"measured, {format_sampling(way)}", way["growth"], "up_to"))
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "text.parse_math": False}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # browsers have the characters that matplotlib's font lacks
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for number, (name, parts, key) in enumerate(curves):
            places, values = [part[key] for part in parts], [part["speedup"] for part in parts]
            axes.plot(
                places,
                values,
                marker="o",
                markersize=3,
                linewidth=1.2 if number else 2.5,
                label=escape_control_characters(name),
            )
        axes.axhline(1.0, color="gray", linewidth=0.8)
        axes.set_xlabel("requests so far")
        axes.set_ylabel("speed-up of output tokens")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize="small")
        figure.savefig(out, format="svg")
    text = out.getvalue()
    return text[text.index("<svg") :]
