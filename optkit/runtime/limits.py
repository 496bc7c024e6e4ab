"""What a session may use, and the refusal of what does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from optkit.errors import LimitError, UsageError

SMALL = 64 * 2**20  # bytes; a request this small is not held against the free memory


@dataclass(frozen=True)
class SessionLimits:
    """What a session may use.

    Attributes:
        max_seq_len: tokens per row, prompt and answer; ``None`` is what the model supports.
        max_batch: rows; ``None`` is no limit.
        memory_limit: bytes of key/value cache; ``None`` is the memory the machine has free when it is asked for.
        prefill_chunk: prompt tokens read at a time.
    """

    max_seq_len: int | None = None
    max_batch: int | None = None
    memory_limit: int | None = None
    prefill_chunk: int = 512

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "max_batch", "memory_limit", "prefill_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} {value}: must be at least 1")


def check_memory(need: int, budget: int | None, what: str) -> None:
    """Raises LimitError if ``need`` bytes are above ``budget``, or without one above what the machine has free."""
    source = "memory_limit is"
    if budget is None:
        budget, source = (_free_memory() if need > SMALL else None), "the machine has free"
    if budget is not None and need > budget:
        raise LimitError(
            f"{what} needs {need:,} bytes, and {source} {budget:,}: use fewer rows, a shorter prompt or fewer new tokens"
        )


def _free_memory() -> int | None:
    """Bytes the machine can still give, where the system says so."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
