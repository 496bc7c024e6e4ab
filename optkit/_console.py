"""What the command line writes where: results on standard output, progress and logs on standard error.

On a terminal long work shows a bar; anywhere else (CI, a pipe) it prints plain lines, at most one a few seconds.
``--json`` leaves standard output to the JSON alone. ``-q`` silences progress, ``-v`` adds the libraries' own logs and
tracebacks. Nothing here decides an exit code; see ``cli.py``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

PLAIN_INTERVAL = 5.0  # seconds between plain progress lines of one piece of work


def set_verbosity(level: int) -> None:
    """-1 quiet, 0 normal, 1 verbose: how much of the libraries' talk reaches standard error."""
    if level > 0:
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", force=True)
        logging.getLogger("optkit").setLevel(logging.DEBUG)
        return
    logging.basicConfig(stream=sys.stderr, level=logging.ERROR, format="%(levelname)s: %(message)s", force=True)
    warnings.simplefilter("ignore")
    for name, value in (("TRANSFORMERS_VERBOSITY", "error"), ("HF_HUB_DISABLE_PROGRESS_BARS", "1"), ("TQDM_DISABLE", "1")):
        os.environ.setdefault(name, value)


class Progress:
    """Callable that stages report to: ``progress(text, done, total)``, the numbers optional. A context manager."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._text = ""
        self._seen: set[str] = set()
        self._last = 0.0
        self._started = time.monotonic()

    def __enter__(self) -> Progress:
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                SpinnerColumn,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )
            from rich.progress import Progress as Bar

            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __call__(self, text: str, done: float | None = None, total: float | None = None) -> None:
        if self.quiet:
            return
        if self._bar is not None:
            self._show_bar(text, done, total)
        else:
            self._show_line(text, done, total)

    def _show_bar(self, text: str, done: float | None, total: float | None) -> None:
        if text != self._text or self._task is None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(text, total=total)
            self._text = text
        self._bar.update(self._task, completed=done or 0, total=total)

    def _show_line(self, text: str, done: float | None, total: float | None) -> None:
        now = time.monotonic()
        if text in self._seen and now - self._last < PLAIN_INTERVAL:  # a step that comes back again and again is said once
            return
        self._seen.add(text)
        self._last = now
        count = f" {done:g}/{total:g}" if done is not None and total else ""
        say(f"[{now - self._started:6.1f} s] {text}{count}")

    def note(self, text: str) -> None:
        """A line that stays, above the bar."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            say(text)


def say(text: str) -> None:
    """One line on standard error."""
    print(text, file=sys.stderr, flush=True)


def print_json(data: Any) -> None:
    """Data as JSON on standard output; numbers that are not finite become text."""
    print(json.dumps(_plain(data), indent=1, ensure_ascii=False, default=str), flush=True)


def _plain(data: Any) -> Any:
    import math

    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    return data


def print_table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), title: str = "") -> None:
    """A table on standard output: drawn on a terminal, tab-separated text with aligned columns anywhere else."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*head, title=title or None, show_header=bool(head), title_justify="left")
        if not head:
            for _ in rows[0] if rows else ():
                table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*(_escape(cell) for cell in row))
        Console().print(table)
        return
    if title:
        print(title)
    lines = [*([head] if head else []), *rows]
    widths = [max(len(row[i]) for row in lines if i < len(row)) for i in range(max((len(r) for r in lines), default=0))]
    for row in lines:
        print("  ".join(cell.ljust(widths[i]) for i, cell in enumerate(row)).rstrip())


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def size(count: float) -> str:
    """Bytes for people, decimal: ``84.9 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
