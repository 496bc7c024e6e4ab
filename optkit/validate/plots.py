"""Small charts as inline SVG text, drawn by hand: no library, no script, no external resource.

Every chart is a 480-unit wide ``<svg>`` that scales with the page; colours come from CSS variables of the page so that they
follow dark mode and print. A chart carries a ``<title>`` for screen readers.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

WIDTH, HEIGHT = 480, 250
LEFT, RIGHT, TOP, BOTTOM = 66, 12, 30, 46


def _text(x: float, y: float, text: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{html.escape(text)}</text>'


def tick_label(value: float) -> str:
    """A short label: ``0``, ``0.05``, ``1,200``, ``3e-05``."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:,.4g}"
    return f"{value:.0e}"


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers from at or below ``low`` to at or above ``high``."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


class _Frame:
    """Axes: maps data to the plot area and draws ticks and titles."""

    def __init__(self, x_ticks: Sequence[float], y_ticks: Sequence[float], x_title: str, y_title: str, title: str) -> None:
        self.x0, self.x1, self.y0, self.y1 = x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1]
        self.parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{html.escape(title)}</title>']
        for y in y_ticks:
            self.parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{self.y(y):.1f}" y2="{self.y(y):.1f}"/>'
            )
            self.parts.append(_text(LEFT - 6, self.y(y) + 4, tick_label(y), "end"))
        middle = (TOP + HEIGHT - BOTTOM) / 2
        self.parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_title, extra=' class="axis"'))
        self.parts.append(_text(14, middle, y_title, extra=f' class="axis" transform="rotate(-90 14 {middle:.1f})"'))

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def x_labels(self, ticks: Sequence[float], labels: Sequence[str] | None = None) -> None:
        for i, tick in enumerate(ticks):
            self.parts.append(_text(self.x(tick), HEIGHT - BOTTOM + 17, labels[i] if labels else tick_label(tick)))

    def done(self) -> str:
        return "".join([*self.parts, "</svg>"])


def line_chart(
    series: Sequence[tuple[str, Sequence[float]]], x_title: str, y_title: str, title: str, limit: float | None = None
) -> str:
    """Lines over positions 0, 1, …; at most three series (``(label, values)``), with an optional horizontal limit.

    Values that are not finite leave a gap.
    """
    values = [v for _, data in series for v in data if math.isfinite(v)]
    length = max(len(data) for _, data in series)
    y_ticks = nice_ticks(0.0, max([*values, limit or 0.0]) or 1.0)
    x_ticks = nice_ticks(0, max(length - 1, 1), 6)
    frame = _Frame([0, max(length - 1, 1)], y_ticks, x_title, y_title, title)
    frame.x_labels([t for t in x_ticks if t <= length - 1])
    if limit is not None:
        y = frame.y(limit)
        frame.parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        frame.parts.append(_text(WIDTH - RIGHT, 14, f"limit {tick_label(limit)}", "end", ' class="limit-text"'))
    for index, (label, data) in enumerate(series):
        path, pen = [], "M"
        for i, value in enumerate(data):
            if math.isfinite(value):
                path.append(f"{pen}{frame.x(i):.1f} {frame.y(value):.1f}")
                pen = "L"
            else:
                pen = "M"
        frame.parts.append(f'<path class="s{index}" d="{"".join(path)}"/>')
        frame.parts.append(_text(LEFT + 110 * index, 14, label, "start", f' class="t{index}"'))
    return frame.done()


def histogram(values: Sequence[float], x_title: str, y_title: str, title: str, bins_per_decade: int = 4) -> str:
    """Counts over logarithmic bins; zeros are put in the lowest bin, values that are not finite in the highest."""
    positive = [v for v in values if v > 0 and math.isfinite(v)]
    low = math.floor(math.log10(min(positive))) if positive else -8
    high = math.ceil(math.log10(max(positive)) + 1e-9) if positive else -7
    high = max(high, low + 1)
    counts = [0] * ((high - low) * bins_per_decade)
    for value in values:
        place = (
            (math.log10(value) - low) * bins_per_decade
            if value > 0 and math.isfinite(value)
            else (0 if value == 0 else len(counts))
        )
        counts[min(max(int(place), 0), len(counts) - 1)] += 1
    frame = _Frame([low, high], nice_ticks(0, max(counts) or 1), x_title, y_title, title)
    frame.x_labels(list(range(low, high + 1)), [f"1e{d}" for d in range(low, high + 1)])
    width = (frame.x(high) - frame.x(low)) / len(counts)
    for i, count in enumerate(counts):
        if count:
            top = frame.y(count)
            x = frame.x(low) + i * width
            frame.parts.append(
                f'<rect class="bar" x="{x + 1:.1f}" y="{top:.1f}" width="{width - 2:.1f}" height="{frame.y(0) - top:.1f}">'
                f"<title>{count}</title></rect>"
            )
    return frame.done()


def standalone(svg: str) -> str:
    """A chart as a file of its own: with the namespace, and with colours that pages otherwise give."""
    style = "text{font:12px sans-serif;fill:#333}.bar{fill:#2a6fb0}.b1{fill:#d9822b}.line{fill:none;stroke:#2a6fb0}"
    return (
        svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", f"><style>{style}</style>", 1) + "\n"
    )


def bars(
    items: Sequence[tuple[str, float]],
    x_title: str,
    title: str,
    digits: int = 4,
    largest: float | None = None,
    left: int = 96,
) -> str:
    """Horizontal bars from 0 with the value at their end; items are ``(label, value)``; ``left`` units are for labels."""
    row, top, right = 38, 6, 76
    height = top + row * len(items) + 26
    span = largest if largest is not None else max([v for _, v in items if math.isfinite(v)], default=1.0) or 1.0
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img"><title>{html.escape(title)}</title>']
    for i, (label, value) in enumerate(items):
        y = top + i * row
        width = max(1.0, (WIDTH - left - right) * min(value, span) / span) if math.isfinite(value) else 1.0
        parts.append(_text(left - 10, y + row / 2 + 4, label, "end"))
        parts.append(f'<rect class="bar b{i % 2}" x="{left}" y="{y + 8}" width="{width:.1f}" height="{row - 16}" rx="3"/>')
        parts.append(_text(left + width + 8, y + row / 2 + 4, f"{value:,.{digits}g}", "start", ' class="value"'))
    parts.append(_text((left + WIDTH - right) / 2, height - 6, x_title, extra=' class="axis"'))
    return "".join([*parts, "</svg>"])
