"""Measuring several artifacts, or one at several sizes of work, fairly: in turns.

Each artifact is opened once, in a process of its own, and stays open. Then, point by point and round by round, every artifact
does the same work in turn, in an order that rotates, while the others wait. What the machine does meanwhile meets all of them
alike, so the *ratio* of two artifacts in one round is steadier than either speed: it is reported as the median over rounds with
its smallest and largest. The first artifact is what the others are compared with.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from optkit import errors
from optkit.errors import EngineError, UsageError, nearest
from optkit.runtime.bench import Progress

#: what a sweep may vary
AXES = ("batch", "prompt_tokens", "new_tokens", "concurrency")


@dataclass(frozen=True)
class Point:
    """One amount of work.

    Attributes:
        prompt_tokens, new_tokens: of each row.
        batch: rows that run together.
        concurrency: rows of the scheduler, for twice as many requests; 0 is without it.
    """

    prompt_tokens: int = 64
    new_tokens: int = 128
    batch: int = 1
    concurrency: int = 0

    def __post_init__(self) -> None:
        if self.new_tokens < 2 or min(self.prompt_tokens, self.batch) < 1 or self.concurrency < 0:
            raise UsageError(f"bench: {self.label}: at least 1 row, 1 prompt token and 2 new tokens")

    @property
    def label(self) -> str:
        """``64 + 128 x 1``: prompt, new tokens, rows."""
        rows = f"{self.concurrency} at a time" if self.concurrency else f"x {self.batch}"
        return f"{self.prompt_tokens} + {self.new_tokens} {rows}"


def points(base: Point, sweeps: Sequence[str]) -> list[Point]:
    """The points of ``NAME=1,2,4`` texts, one axis after the other; ``[base]`` without any.

    Raises:
        UsageError: an unknown name, or no whole numbers.
    """
    found: list[Point] = []
    for text in sweeps:
        name, _, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in AXES:
            raise UsageError(f"sweep {text!r}: there is {', '.join(AXES)}{nearest(name, AXES)}, as in batch=1,2,4")
        try:
            numbers = [int(value) for value in values.split(",")]
        except ValueError as error:
            raise UsageError(f"sweep {text!r}: whole numbers with commas, as in batch=1,2,4") from error
        found += [replace(base, **{name: number}) for number in numbers]
    return list(dict.fromkeys(found)) or [base]


class Worker:
    """A process that has one artifact open and does rounds when asked.

    Raises:
        EngineError: it ended; carries its last line.
        OptkitError: what the process itself met: the same class, the same words.
    """

    def __init__(self, artifact: str | Path, backend: str | None, threads: int | None) -> None:
        self.artifact = str(artifact)
        command = [sys.executable, "-m", "optkit.runtime.bench_worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
        )
        try:
            self.opened = self.ask({"artifact": self.artifact, "backend": backend, "threads": threads})
        except BaseException:
            self.close()
            raise

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Sends one request and waits for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            self._process.stdin.close()
            assert self._process.stderr is not None
            last = (self._process.stderr.read().strip().splitlines() or ["no message"])[-1]
            raise EngineError(f"{self.artifact}: the benchmark ended with exit code {self._process.wait()}: {last}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            kind: type[errors.OptkitError] = getattr(errors, answer["kind"])
            raise kind(answer["error"])
        return answer

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._process.terminate()
        self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def compare(
    artifacts: Sequence[str | Path],
    work: Sequence[Point] = (Point(),),
    rounds: int = 5,
    warmup: int = 1,
    threads: int | None = None,
    backend: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures every artifact at every point, in turns; every key carries its unit.

    Args:
        artifacts: exported directories or checkpoints; the first is what the others are compared with.
        work: the points.
        rounds, warmup: measured rounds of each point, and rounds before them that do not count.
        threads, backend: as for ``open_session``.
        progress: called with ``(text, done, total)``.

    Returns:
        ``artifacts`` (name, load time, memory) and ``points``, each with the medians of every artifact and, of all but the
        first, ``decode_ratio`` and ``prefill_ratio`` as ``[median, smallest, largest]``.

    Raises:
        UsageError: nothing to measure.
        OptkitError: an artifact does not open, or fails.
    """
    if not artifacts or rounds < 1 or warmup < 0:
        raise UsageError("bench: at least one artifact and one round")
    workers: list[Worker] = []
    total = len(work) * (rounds + warmup)
    try:
        for artifact in artifacts:
            if progress:
                progress(f"opening {artifact}")
            workers.append(Worker(artifact, backend, threads))
        measured = []
        for index, point in enumerate(work):
            results: list[list[dict[str, Any]]] = [[] for _ in workers]
            for turn in range(warmup + rounds):
                if progress:
                    progress("measuring", index * (rounds + warmup) + turn, total)
                for at in (*range(turn % len(workers), len(workers)), *range(turn % len(workers))):
                    answer = workers[at].ask(asdict(point))
                    if turn >= warmup:
                        results[at].append(answer)
            measured.append({**asdict(point), "label": point.label, "artifacts": _summaries(results)})
        ends = [worker.ask({"end": True}) for worker in workers]
    finally:
        for worker in workers:
            worker.close()
    described = [{"artifact": worker.artifact, **worker.opened, **end} for worker, end in zip(workers, ends, strict=True)]
    return {"threads": threads, "rounds": rounds, "artifacts": described, "points": measured}


def _summaries(results: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Medians of each artifact's rounds, and ratios with the first artifact's of the same round."""
    found = []
    for index, rounds in enumerate(results):
        summary: dict[str, Any] = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        summary["decode_tokens_per_second_rounds"] = [r["decode_tokens_per_second"] for r in rounds]
        for name in ("decode", "prefill") if index else ():
            key = f"{name}_tokens_per_second"
            ratios = [ours[key] / first[key] for ours, first in zip(rounds, results[0], strict=True) if first.get(key)]
            if ratios and key in rounds[0]:
                summary[f"{name}_ratio"] = [statistics.median(ratios), min(ratios), max(ratios)]
        found.append(summary)
    return found


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table for people, under :data:`HEAD`."""
    table: list[tuple[str, ...]] = []
    for point in result["points"]:
        for described, found in zip(result["artifacts"], point["artifacts"], strict=True):
            ratio = found.get("decode_ratio")
            table.append(
                (
                    point["label"],
                    Path(described["artifact"]).name or described["artifact"],
                    f"{found['decode_tokens_per_second']:.1f}",
                    f"{found['prefill_tokens_per_second']:.0f}" if "prefill_tokens_per_second" in found else "-",
                    f"{found['ttft_ms']:.1f}" if "ttft_ms" in found else "-",
                    f"{found['inter_token_p99_ms']:.2f}" if "inter_token_p99_ms" in found else "-",
                    f"{ratio[0]:.2f}x ({ratio[1]:.2f} to {ratio[2]:.2f})" if ratio else "-",
                )
            )
    return table


HEAD = ("tokens x rows", "artifact", "decode tok/s", "prefill tok/s", "first token ms", "P99 ms", "decode ratio")
