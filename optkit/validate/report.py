"""The result of a validation and its three files: ``report.json``, ``report.md`` and ``report.html``.

The JSON is the record (every number with its unit, the checks, the per-step series); the Markdown is for a pull request or
a terminal; the HTML is one self-contained page with plots that can be mailed, opened on a phone and printed.
"""

from __future__ import annotations

import html
import json
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import optkit
from optkit.errors import storage_errors
from optkit.validate import plots

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Metric:
    """One number with its unit; ``label`` and ``note`` are for people."""

    name: str
    value: float
    unit: str
    label: str
    note: str = ""


@dataclass(frozen=True)
class Check:
    """A limit and what was measured. ``bound`` is ``at most`` or ``at least``."""

    name: str
    value: float
    limit: float
    unit: str
    bound: str
    reason: str = ""

    @property
    def passed(self) -> bool:
        """A value that is not a number never passes."""
        return self.value <= self.limit if self.bound == "at most" else self.value >= self.limit

    def describe(self) -> str:
        return f"{self.name} is {number(self.value)} {self.unit}, and {self.bound} {number(self.limit)} is allowed"


@dataclass
class Comparison:
    """A candidate beside one reference.

    Attributes:
        title: what is judged by it.
        reference: facts of the reference (name, path, backend, …).
        metrics, checks: in the order they are shown.
        cases: one row per case.
        series: the plotted numbers: ``kl_by_step_mean``, ``kl_by_step_max`` (nats), ``logit_errors`` (of range).
        greedy: per prompt: steps, matched, near ties, both token lists.
    """

    title: str
    reference: Mapping[str, Any]
    metrics: list[Metric] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    cases: list[dict[str, Any]] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)
    greedy: list[dict[str, Any]] = field(default_factory=list)

    def value(self, name: str) -> float | None:
        """The metric called ``name``, ``None`` if it was not measured."""
        return next((m.value for m in self.metrics if m.name == name), None)


@dataclass
class Report:
    """What :func:`optkit.validate.run.validate` returns."""

    candidate: Mapping[str, Any]
    settings: Mapping[str, Any]
    comparisons: list[Comparison]
    notes: list[str] = field(default_factory=list)
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def checks(self) -> list[Check]:
        return [check for comparison in self.comparisons for check in comparison.checks]

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    @property
    def passed(self) -> bool:
        return not self.failures

    def value(self, name: str) -> float | None:
        """A metric of the first comparison, the one against the reference."""
        return self.comparisons[0].value(name)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; numbers that are not finite become text, since JSON has none."""
        data = asdict(self)
        for comparison, plain in zip(self.comparisons, data["comparisons"], strict=True):
            plain["checks"] = [{**asdict(check), "passed": check.passed} for check in comparison.checks]
        data = {"format_version": FORMAT_VERSION, "optkit_version": optkit.__version__, "passed": self.passed, **data}
        clean: dict[str, Any] = _json_safe(data)
        return clean


def _json_safe(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, Mapping):
        return {str(key): _json_safe(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_json_safe(value) for value in data]
    return data


def number(value: float) -> str:
    """Four significant digits; scientific below 1e-3."""
    if not math.isfinite(value):
        return str(value)
    if value and abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.4g}"


def shown(metric: Metric) -> str:
    """A metric's value as people read it: shares and relative changes in per cent."""
    if metric.unit == "share":
        return f"{100 * metric.value:.2f} %"
    if metric.unit == "relative":
        return f"{100 * metric.value:+.2f} %"
    return f"{number(metric.value)} {metric.unit}".strip()


def write_report(report: Report, directory: str | Path) -> dict[str, Path]:
    """Writes the three files and returns their paths by kind (``json``, ``md``, ``html``).

    Raises:
        StorageError: disk full, or the place is not writable.
    """
    directory = Path(directory)
    content = {
        "report.json": json.dumps(report.to_dict(), indent=1) + "\n",
        "report.md": to_markdown(report),
        "report.html": to_html(report),
    }
    with storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in content.items():
            partial = directory / (name + ".part")
            partial.write_text(text, encoding="utf-8")
            partial.replace(directory / name)
    return {name.rpartition(".")[2]: directory / name for name in content}


def verdict(report: Report) -> tuple[str, str]:
    """``(css class, sentence)``."""
    if report.failures:
        return "fail", f"Failed: {len(report.failures)} of {len(report.checks)} checks"
    return "pass", f"Passed: {len(report.checks)} checks"


def to_markdown(report: Report) -> str:
    lines = [f"# Validation of {report.candidate['name']}", "", f"**{verdict(report)[1]}**", ""]
    for comparison in report.comparisons:
        lines += [f"## {comparison.title}", "", f"Reference: {comparison.reference['name']} ({comparison.reference.get('backend', '')})", ""]
        lines += ["| metric | value |", "|---|---|"]
        lines += [f"| {m.label} | {shown(m)}{f' ({m.note})' if m.note else ''} |" for m in comparison.metrics]
        if comparison.checks:
            lines += ["", "| check | measured | allowed | |", "|---|---|---|---|"]
            lines += [
                f"| {c.name} | {number(c.value)} {c.unit} | {c.bound} {number(c.limit)} | {'pass' if c.passed else '**FAIL**'} |"
                for c in comparison.checks
            ]
        lines.append("")
    lines += [f"- {note}" for note in report.notes]
    return "\n".join(lines).rstrip() + "\n"


def to_html(report: Report) -> str:
    """The page, from ``report_template.html``."""
    template = string.Template((Path(__file__).parent / "report_template.html").read_text(encoding="utf-8"))
    name = str(report.candidate["name"])
    style, sentence = verdict(report)
    parts = [f"<header><h1>{_e(name)}</h1><p class='soft'>{_e(_facts(report.candidate))}</p>"]
    parts.append(f"<p class='verdict {style}'>{_e(sentence)}</p></header>")
    for index, comparison in enumerate(report.comparisons):
        parts += _comparison_html(comparison, with_plots=True, first=index == 0)
    if report.notes:
        parts.append("<h2>Notes</h2><ul>" + "".join(f"<li>{_e(note)}</li>" for note in report.notes) + "</ul>")
    parts.append("<h2>How it was made</h2>")
    rows = [("optkit", optkit.__version__), *report.versions.items(), ("time", f"{report.seconds:.0f} s")]
    rows += [(key, value) for key, value in report.settings.items() if not isinstance(value, Mapping)]
    parts.append(_table(["setting", "value"], [[_e(str(k)), f"<code>{_e(str(v))}</code>"] for k, v in rows]))
    return template.substitute(title=_e(f"{name}: validation"), body="\n".join(parts))


def _e(text: str) -> str:
    return html.escape(text)


def _facts(side: Mapping[str, Any]) -> str:
    known = ("kind", "scheme", "target", "dtype", "backend", "size")
    return " · ".join(str(side[key]) for key in known if side.get(key))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    def cell(tag: str, i: int, text: str) -> str:
        return f"<{tag} class='n'>{text}</{tag}>" if i in numeric else f"<{tag}>{text}</{tag}>"

    header = "".join(cell("th", i, _e(text)) for i, text in enumerate(head))
    body = "".join("<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>" for row in rows)
    return f"<div class='scroll'><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>"


def _comparison_html(comparison: Comparison, with_plots: bool, first: bool) -> list[str]:
    parts = [f"<h2>{_e(comparison.title)}</h2>"]
    parts.append(f"<p class='soft'>Reference: <code>{_e(str(comparison.reference['name']))}</code> {_e(_facts(comparison.reference))}</p>")
    tiles = [m for m in comparison.metrics if m.name in TILES]
    parts.append("<div class='tiles'>" + "".join(f"<div class='tile'><b>{_e(shown(m))}</b><span>{_e(m.label)}</span></div>" for m in tiles) + "</div>")
    if comparison.checks:
        rows = [
            [
                _e(c.name) + (f"<br><span class='soft'>{_e(c.reason)}</span>" if c.reason else ""),
                f"{number(c.value)} {_e(c.unit)}",
                f"{c.bound} {number(c.limit)}",
                f"<b class='{'pass' if c.passed else 'fail'}'>{'pass' if c.passed else 'FAIL'}</b>",
            ]
            for c in comparison.checks
        ]
        parts.append(_table(["check", "measured", "allowed", ""], rows, numeric=(1, 2)))
    if with_plots:
        parts.append("<div class='charts'>" + "".join(f"<figure>{svg}<figcaption>{_e(text)}</figcaption></figure>" for svg, text in _charts(comparison)) + "</div>")
    rest = [[_e(m.label) + (f"<br><span class='soft'>{_e(m.note)}</span>" if m.note else ""), _e(shown(m))] for m in comparison.metrics]
    parts.append("<details" + (" open" if first else "") + "><summary>All numbers</summary>" + _table(["metric", "value"], rows, numeric=(1,)))
    if comparison.cases:
        rows = [
            [_e(c["name"]), _e(", ".join(map(str, c["lengths"]))), str(c["steps"]), number(c["kl_mean"]), number(c["kl_max"]), f"{100 * c['top1_agreement']:.1f} %", number(c["logit_error"])]
            for c in comparison.cases
        ]
        parts.append(_table(["case", "prompt lengths", "decode steps", "KL mean, nats", "KL max, nats", "top-1", "logit error, of range"], rows, numeric=range(2, 7)))
    parts.append("</details>")
    return parts


TILES = ("kl_mean", "top1_agreement", "perplexity_delta", "greedy_match", "logit_error", "noise_floor")


def _charts(comparison: Comparison) -> list[tuple[str, str]]:
    """``(svg, caption)`` of each plot there is data for."""
    charts = []
    series = comparison.series
    if series.get("kl_by_step_mean"):
        limit = next((c.limit for c in comparison.checks if c.name == "kl_mean"), None)
        lines = [("largest", series["kl_by_step_max"]), ("mean of rows", series["kl_by_step_mean"])]
        svg = plots.line_chart(lines, "decode step (0 is the prompt)", "KL, nats", "KL divergence by decode step", limit)
        charts.append((svg, "KL divergence from the reference at each teacher-forced step. A rise with the step points at the cache."))
    if series.get("logit_errors"):
        svg = plots.histogram(series["logit_errors"], "largest logit error, share of the logit range", "positions", "Histogram of logit errors")
        charts.append((svg, "Largest logit error of each position, relative to the reference's logit range."))
    if comparison.cases:
        items = [(c["name"], 100 * c["top1_agreement"]) for c in comparison.cases]
        svg = plots.bars(items, "per cent of positions", "Top-1 agreement by case", digits=4, largest=100.0)
        charts.append((svg, "Same most likely token as the reference, near ties counted as same."))
    reference, candidate = comparison.value("perplexity_reference"), comparison.value("perplexity_candidate")
    if reference is not None and candidate is not None:
        svg = plots.bars([("reference", reference), ("candidate", candidate)], "perplexity (lower is better)", "Perplexity on real text")
        charts.append((svg, "Perplexity per token on real text, the same windows for both."))
    return charts
