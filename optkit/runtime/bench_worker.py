"""The process behind :class:`optkit.runtime.compare.Worker`: one JSON object a line on standard input, one on standard output.

First ``{"artifact", "backend", "threads"}``, then any number of points, then ``{"end": true}`` for the memory it came to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

import numpy as np

from optkit.errors import OptkitError
from optkit.runtime.bench import MEDIANS, peak_rss
from optkit.runtime.scheduler import Scheduler
from optkit.runtime.session import open_session


class Rounds:
    """An open artifact."""

    def __init__(self, artifact: str, backend: str | None, threads: int | None) -> None:
        started = time.perf_counter()
        self._arguments = artifact, backend, threads
        self.session = open_session(artifact, backend=backend, threads=threads)
        self.load_ms = (time.perf_counter() - started) * 1000.0
        self._serving: Any = None
        self._schedulers: dict[tuple[int, int], Scheduler] = {}

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        ids = np.random.default_rng(0).integers(0, self.session.spec.vocab_size, (count, tokens))
        return [row.tolist() for row in ids]

    def run(self, point: dict[str, int]) -> dict[str, float]:
        """One round."""
        if point["concurrency"]:
            return self._serve(point)
        stats = self.session.generate(
            self.prompts(point["batch"], point["prompt_tokens"]),
            max_new_tokens=point["new_tokens"],
            ignore_eos=True,
            do_sample=False,
            reuse_prefix=False,
        ).stats
        found = {key.replace("ttft_warm_ms", "ttft_ms"): float(getattr(stats, source)) for key, source in MEDIANS.items()}
        return {**found, "loop_share": stats.loop_fraction, "kv_bytes": float(stats.kv_bytes)}

    def _serve(self, point: dict[str, int]) -> dict[str, float]:
        """New tokens a second while requests come and go; prompts are read beside."""
        rows, length = point["concurrency"], point["prompt_tokens"] + point["new_tokens"]
        if self._serving is None:
            self._serving = open_session(*self._arguments, chunks=True)
        scheduler = Scheduler(self._serving, rows=rows, capacity=length)
        prompts = self.prompts(2 * rows, point["prompt_tokens"])
        started = time.perf_counter()
        for prompt in prompts:
            scheduler.submit(prompt, max_new_tokens=point["new_tokens"], ignore_eos=True, do_sample=False)
        scheduler.run()
        return {"decode_tokens_per_second": len(prompts) * point["new_tokens"] / (time.perf_counter() - started)}


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answers until the requests end; an error of optkit's is an answer too."""
    rounds: Rounds | None = None
    for line in requests:
        message = json.loads(line)
        try:
            if rounds is None:
                rounds = Rounds(**message)
                answer: dict[str, Any] = {"backend": rounds.session.backend, "load_ms": rounds.load_ms}
            elif "end" in message:
                answer = {"peak_rss_bytes": peak_rss()}
            else:
                answer = rounds.run(message)
        except OptkitError as error:
            answer = {"error": str(error), "kind": type(error).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print does not mix with the answers
    serve(sys.stdin, out)
