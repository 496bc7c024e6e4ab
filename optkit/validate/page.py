"""The report as one HTML page: verdict, headline numbers, checks, plots, every number, and how it was made."""

from __future__ import annotations

import html
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optkit
from optkit.validate import plots
from optkit.validate.report import Check, Comparison, Metric, Report, number, shown, verdict

TILES = ("kl_mean", "top1_agreement", "perplexity_delta", "greedy_match", "logit_error", "noise_floor")


def to_html(report: Report) -> str:
    """The page, from ``report_template.html``; it refers to nothing outside itself."""
    template = string.Template((Path(__file__).parent / "report_template.html").read_text(encoding="utf-8"))
    style, sentence = verdict(report)
    name = str(report.candidate["name"])
    parts = [
        f"<header><h1>{_e(name)}</h1><p class='soft'>{_e(_facts(report.candidate))}</p>",
        f"<p class='verdict {style}'>{_e(sentence)}</p></header>",
        *(_comparison(comparison, first=i == 0) for i, comparison in enumerate(report.comparisons)),
        _notes(report.notes),
        _provenance(report),
    ]
    return template.substitute(title=_e(f"{name}: validation"), body="\n".join(part for part in parts if part))


def _e(text: Any) -> str:
    return html.escape(str(text))


def _facts(side: Mapping[str, Any]) -> str:
    known = ("kind", "scheme", "target", "dtype", "backend", "size")
    return " · ".join(str(side[key]) for key in known if side.get(key))


def _comparison(comparison: Comparison, first: bool) -> str:
    reference = comparison.reference
    parts = [
        f"<h2>{_e(comparison.title)}</h2>",
        f"<p class='soft'>Reference: <code>{_e(reference['name'])}</code> {_e(_facts(reference))}</p>",
        _tiles(comparison.metrics),
        _checks(comparison.checks),
        _figures(comparison),
        f"<details{' open' if first else ''}><summary>All numbers</summary>",
        _metrics(comparison.metrics),
        _cases(comparison.cases),
        "</details>",
    ]
    return "\n".join(part for part in parts if part)


def _tiles(metrics: Sequence[Metric]) -> str:
    tiles = []
    for metric in metrics:
        if metric.name in TILES:
            value, _, unit = shown(metric).partition(" ")
            tiles.append(f"<div class='tile'><b>{_e(value)} <small>{_e(unit)}</small></b><span>{_e(metric.label)}</span></div>")
    return f"<div class='tiles'>{''.join(tiles)}</div>"


def _checks(checks: Sequence[Check]) -> str:
    if not checks:
        return ""
    rows = []
    for check in checks:
        outcome = "<b class='pass'>pass</b>" if check.passed else "<b class='fail'>FAIL</b>"
        measured = f"{number(check.value)} <span class='soft'>{_e(check.unit)}</span>"
        rows.append([_labelled(check.name, check.reason), measured, f"{check.bound} {number(check.limit)}", outcome])
    return _table(["check", "measured", "allowed", ""], rows, numeric=(1, 2))


def _metrics(metrics: Sequence[Metric]) -> str:
    return _table(["metric", "value"], [[_labelled(m.label, m.note), _e(shown(m))] for m in metrics], numeric=(1,))


def _cases(cases: Sequence[Mapping[str, Any]]) -> str:
    if not cases:
        return ""
    head = ["case", "prompt lengths", "decode steps", "KL mean, nats", "KL max, nats", "top-1", "logit error, of range"]
    rows = [
        [
            _e(case["name"]),
            _e(", ".join(map(str, case["lengths"]))),
            str(case["steps"]),
            number(case["kl_mean"]),
            number(case["kl_max"]),
            f"{100 * case['top1_agreement']:.1f} %",
            number(case["logit_error"]),
        ]
        for case in cases
    ]
    return _table(head, rows, numeric=range(2, len(head)))


def _notes(notes: Sequence[str]) -> str:
    return f"<h2>Notes</h2><ul>{''.join(f'<li>{_e(note)}</li>' for note in notes)}</ul>" if notes else ""


def _provenance(report: Report) -> str:
    """Versions, settings and the time it took."""
    rows = [("optkit", optkit.__version__), *report.versions.items(), ("time", f"{report.seconds:.0f} s")]
    rows += [(key, value) for key, value in report.settings.items() if not isinstance(value, Mapping)]
    table = _table(["setting", "value"], [[_e(key), f"<code>{_e(value)}</code>"] for key, value in rows])
    return f"<h2>How it was made</h2>{table}"


def _labelled(label: str, note: str) -> str:
    return _e(label) + (f"<br><span class='soft'>{_e(note)}</span>" if note else "")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """``rows`` are HTML already; columns in ``numeric`` are set to the right."""

    def line(tag: str, cells: Sequence[str]) -> str:
        marks = [" class='n'" if i in numeric else "" for i in range(len(cells))]
        return "<tr>" + "".join(f"<{tag}{mark}>{cell}</{tag}>" for mark, cell in zip(marks, cells, strict=True)) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    header = line("th", [_e(text) for text in head])
    return f"<div class='scroll'><table><thead>{header}</thead><tbody>{body}</tbody></table></div>"


def _figures(comparison: Comparison) -> str:
    figures = [f"<figure>{svg}<figcaption>{_e(text)}</figcaption></figure>" for svg, text in charts(comparison)]
    return f"<div class='charts'>{''.join(figures)}</div>" if figures else ""


def charts(comparison: Comparison) -> list[tuple[str, str]]:
    """``(svg, caption)`` of each plot there is data for."""
    charts = []
    series = comparison.series
    if series.get("kl_by_step_mean"):
        limit = next((c.limit for c in comparison.checks if c.name == "kl_mean"), None)
        lines = [("largest", series["kl_by_step_max"]), ("mean of rows", series["kl_by_step_mean"])]
        svg = plots.line_chart(lines, "decode step (0 is the prompt)", "KL, nats", "KL divergence by decode step", limit)
        charts.append(
            (svg, "KL divergence from the reference at each teacher-forced step. A rise with the step points at the cache.")
        )
    if series.get("logit_errors"):
        svg = plots.histogram(
            series["logit_errors"], "largest logit error, share of the logit range", "positions", "Histogram of logit errors"
        )
        charts.append((svg, "Largest logit error of each position, relative to the reference's logit range."))
    if comparison.cases:
        items = [(c["name"], 100 * c["top1_agreement"]) for c in comparison.cases]
        svg = plots.bars(items, "per cent of positions", "Top-1 agreement by case", digits=4, largest=100.0)
        charts.append((svg, "Same most likely token as the reference, near ties counted as same."))
    reference, candidate = comparison.value("perplexity_reference"), comparison.value("perplexity_candidate")
    if reference is not None and candidate is not None:
        svg = plots.bars(
            [("reference", reference), ("candidate", candidate)], "perplexity (lower is better)", "Perplexity on real text"
        )
        charts.append((svg, "Perplexity per token on real text, the same windows for both."))
    return charts
