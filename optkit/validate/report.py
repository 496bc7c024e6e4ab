"""The result of a validation and its three files: ``report.json``, ``report.md`` and ``report.html``.

The JSON is the record (every number with its unit, the checks, the per-step series); the Markdown is for a pull request or
a terminal; the HTML is one self-contained page with plots that can be mailed, opened on a phone and printed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import optkit
from optkit.errors import storage_errors

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
    from optkit.validate.page import to_html

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
        lines += [
            f"## {comparison.title}",
            "",
            f"Reference: {comparison.reference['name']} ({comparison.reference.get('backend', '')})",
            "",
        ]
        lines += ["| metric | value |", "|---|---|"]
        lines += [f"| {m.label} | {shown(m)}{f' ({m.note})' if m.note else ''} |" for m in comparison.metrics]
        if comparison.checks:
            lines += ["", "| check | measured | allowed | |", "|---|---|---|---|"]
            for c in comparison.checks:
                outcome = "pass" if c.passed else "**FAIL**"
                lines.append(f"| {c.name} | {number(c.value)} {c.unit} | {c.bound} {number(c.limit)} | {outcome} |")
        lines.append("")
    lines += [f"- {note}" for note in report.notes]
    return "\n".join(lines).rstrip() + "\n"
