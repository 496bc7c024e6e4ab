"""What a generation cost, with the unit in every name.

``ttft_ms`` is the time from the call of ``generate`` to the choice of the first token: tokenizing, prefill and sampling, no
model loading. ``inter_token_*`` are the times between consecutive choices (a batch chooses for all rows at once, so it is
also what each reader of a batch waits). ``tokens_per_second`` counts the tokens after the first over the time after the
first, all rows together: the decode rate. ``engine_s`` is the part spent inside the backend; the rest is the loop's own.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class GenerationStats:
    """Times and counts of one ``generate`` call.

    Attributes:
        prompt_tokens, new_tokens: over all rows.
        reused_tokens: prompt tokens that were still in the cache and not read again.
        prefills, decodes: runs of the backend.
        ttft_ms: time to first token.
        inter_token_p50_ms, inter_token_p90_ms, inter_token_p99_ms: 0.0 when only one token was made.
        tokens_per_second: decode, all rows.
        prefill_tokens_per_second: prompt tokens read over the time of the prefill alone.
        total_s, engine_s: of the call, and of the backend's runs within it.
        kv_bytes: size of the key/value cache.
        drafted_tokens, accepted_tokens: of speculation.
    """

    prompt_tokens: int
    new_tokens: int
    reused_tokens: int
    prefills: int
    decodes: int
    ttft_ms: float
    inter_token_p50_ms: float
    inter_token_p90_ms: float
    inter_token_p99_ms: float
    tokens_per_second: float
    prefill_tokens_per_second: float
    total_s: float
    engine_s: float
    kv_bytes: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def loop_fraction(self) -> float:
        """The share of the time that is not the backend's."""
        return 1.0 - self.engine_s / self.total_s if self.total_s else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "loop_fraction": self.loop_fraction, "acceptance_rate": self.acceptance_rate}


class Recorder:
    """Collects times while a generation runs; ``finish`` makes the statistics."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.choices: list[tuple[float, int]] = []  # when, and how many tokens were chosen
        self.prompt_tokens = self.reused_tokens = self.prefills = self.decodes = 0
        self.drafted_tokens = self.accepted_tokens = 0
        self.prefill_s = self.engine_s = 0.0
        self.kv_bytes = 0

    def ran_prefill(self, began: float) -> None:
        took = time.perf_counter() - began
        self.prefills += 1
        self.prefill_s += took
        self.engine_s += took

    def ran_decode(self, began: float) -> float:
        took = time.perf_counter() - began
        self.decodes += 1
        self.engine_s += took
        return took

    def chose(self, tokens: int) -> None:
        self.choices.append((time.perf_counter(), tokens))

    def finish(self) -> GenerationStats:
        now = time.perf_counter()
        times = np.array([when for when, _ in self.choices] or [now])
        counts = [count for _, count in self.choices] or [0]
        # a step that yields several tokens of one row (speculation) is spread over them
        gaps = np.diff(times) * 1000.0
        p50, p90, p99 = np.percentile(gaps, (50, 90, 99)).tolist() if len(gaps) else (0.0, 0.0, 0.0)
        after_first = float(times[-1] - times[0])
        read = self.prompt_tokens - self.reused_tokens
        return GenerationStats(
            prompt_tokens=self.prompt_tokens,
            new_tokens=sum(counts),
            reused_tokens=self.reused_tokens,
            prefills=self.prefills,
            decodes=self.decodes,
            ttft_ms=(float(times[0]) - self.started) * 1000.0,
            inter_token_p50_ms=p50,
            inter_token_p90_ms=p90,
            inter_token_p99_ms=p99,
            tokens_per_second=sum(counts[1:]) / after_first if after_first else 0.0,
            prefill_tokens_per_second=read / self.prefill_s if self.prefill_s else 0.0,
            total_s=now - self.started,
            engine_s=self.engine_s,
            kv_bytes=self.kv_bytes,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )
