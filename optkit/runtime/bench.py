"""What a session costs: load time, time to first token, inter-token latency, speed, memory.

The first call of a fresh session is reported by itself (**cold**: it pays for first-time work of the engine), then rounds
that do not count, then the measured ones (**warm**), whose medians are shown. Every round generates ``new_tokens`` greedy
tokens from a prompt of seeded random ids and does not stop at an end-of-sequence token, so all rounds do the same work.
Random ids cost what text costs: no step depends on the values. Peak memory is the process's; to measure an artifact and
nothing else, use a process of its own (:func:`bench_process`, which ``optkit build`` does).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from optkit.errors import EngineError, UsageError
from optkit.runtime.session import open_session

Progress = Callable[..., None]

MEDIANS = {
    "ttft_warm_ms": "ttft_ms",
    "inter_token_p50_ms": "inter_token_p50_ms",
    "inter_token_p90_ms": "inter_token_p90_ms",
    "inter_token_p99_ms": "inter_token_p99_ms",
    "decode_tokens_per_second": "tokens_per_second",
    "prefill_tokens_per_second": "prefill_tokens_per_second",
}


def bench(
    artifact: str | Path,
    prompt_tokens: int = 64,
    new_tokens: int = 128,
    rounds: int = 5,
    warmup: int = 1,
    batch: int = 1,
    threads: int | None = None,
    backend: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures ``artifact``; every key carries its unit.

    Args:
        artifact: an exported directory, or a checkpoint run in torch.
        prompt_tokens, new_tokens: of each row.
        rounds, warmup: measured rounds, and rounds before them that do not count (the cold one is the first of all).
        batch: rows that run together.
        threads, backend: as for ``open_session``.
        progress: called with ``(text, done, total)``.

    Raises:
        UsageError: fewer than 2 new tokens (there would be no decode step to measure).
        LimitError: prompt and answer do not fit the artifact.
    """
    if new_tokens < 2 or prompt_tokens < 1 or rounds < 1 or batch < 1:
        raise UsageError(
            f"bench: prompt {prompt_tokens}, new tokens {new_tokens}, rounds {rounds}, batch {batch}: at least 1, 2, 1, 1"
        )
    tell: Progress = progress or (lambda *_: None)
    tell("opening")
    started = time.perf_counter()
    with open_session(artifact, backend=backend, threads=threads) as session:
        load_s = time.perf_counter() - started
        ids = np.random.default_rng(0).integers(0, session.spec.vocab_size, (batch, prompt_tokens))
        prompts = [row.tolist() for row in ids]
        stats = []
        for i in range(1 + warmup + rounds):
            tell("measuring", i, 1 + warmup + rounds)
            stats.append(
                session.generate(prompts, max_new_tokens=new_tokens, ignore_eos=True, do_sample=False, reuse_prefix=False).stats
            )
        name = session.backend
    warm = stats[1 + warmup :]
    measured = {key: statistics.median(getattr(s, source) for s in warm) for key, source in MEDIANS.items()}
    return {
        "artifact": str(artifact),
        "backend": name,
        "threads": threads,
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "rounds": rounds,
        "load_ms": load_s * 1000.0,
        "ttft_cold_ms": stats[0].ttft_ms,
        **measured,
        "decode_tokens_per_second_rounds": [s.tokens_per_second for s in warm],
        "loop_share": statistics.median(s.loop_fraction for s in warm),
        "kv_bytes": max(s.kv_bytes for s in warm),
        "peak_rss_bytes": peak_rss(),
    }


def bench_process(artifact: str | Path, **options: Any) -> dict[str, Any]:
    """:func:`bench` in a process of its own, so that memory and first-call times are the artifact's.

    Raises:
        EngineError: the process failed; carries its last line.
    """
    given = {key: value for key, value in options.items() if value is not None}
    arguments = [text for key, value in given.items() for text in ("--" + key.replace("_", "-"), str(value))]
    command = [sys.executable, "-m", "optkit", "bench", str(artifact), "--json", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EngineError(f"{artifact}: the benchmark ended with exit code {done.returncode}: {last.removeprefix('error: ')}")
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def peak_rss() -> int:
    """The most memory this process has held so far, bytes.

    Linux counts it per program (``VmHWM``); ``ru_maxrss`` would include what the parent held when it started this process.
    """
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def since_process_start() -> float | None:
    """Seconds since the system started this process, interpreter start included; ``None`` where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
        return uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return None


def rows(measured: dict[str, Any]) -> list[tuple[str, str]]:
    """The table for people."""
    return [
        ("backend, threads, rows", f"{measured['backend']}, {measured['threads'] or 'default'}, {measured['batch']}"),
        ("load", f"{measured['load_ms']:.0f} ms"),
        ("time to first token, cold", f"{measured['ttft_cold_ms']:.1f} ms"),
        ("time to first token, warm", f"{measured['ttft_warm_ms']:.1f} ms"),
        ("inter-token P50 / P90 / P99", " / ".join(f"{measured[f'inter_token_p{p}_ms']:.2f}" for p in (50, 90, 99)) + " ms"),
        ("decode", f"{measured['decode_tokens_per_second']:.1f} tokens/s"),
        ("prefill", f"{measured['prefill_tokens_per_second']:.0f} tokens/s"),
        ("KV cache", f"{measured['kv_bytes'] / 1e6:.1f} MB"),
        ("peak memory of the process", f"{measured['peak_rss_bytes'] / 1e6:.0f} MB"),
        ("share of the time outside the engine", f"{100 * measured['loop_share']:.1f} %"),
    ]
