"""What every backend is: a :class:`Session`.

The backend owns the key/value cache, the caller owns the tokens. The contract, the same for every backend:

    prefill(input_ids [B, S], lengths [B])  B new sequences, right padded  -> logits [B, V] of each row's last token
    decode(token_ids [B])                   one more token per row         -> logits [B, V]
    extend(input_ids [B, S], lengths [B])   0..S more tokens per row       -> logits [B, V], or [B, S, V] for "all"
    truncate(lengths [B])                   forgets the tokens after the first lengths[b]
    select(rows [B'])                       row i becomes a copy of old row rows[i]: drops, reorders or multiplies rows
    reset()                                 forgets everything

Rows never influence each other, and padding never influences a row. What does not fit is refused before it runs
(:class:`LimitError`). Logits are float32; NaN or infinity in them raises :class:`EngineError`.

**KV memory.** The cache is sized to the request (``capacity``), rounded up to ``KV_CHUNK`` tokens, and grows when it is
outgrown; never is the model's maximum allocated. A long prompt is read ``prefill_chunk`` tokens at a time, which bounds the
memory of the activations. Some models use another rotary table for *all* positions once a row is longer than
``rope_switch`` tokens: a row that crosses it is read again in one go, as transformers' uncached forward would.
"""

from __future__ import annotations

import abc
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from optkit.errors import EngineError, LimitError, UnsupportedError, UsageError
from optkit.manifest import ModelSpec
from optkit.runtime.limits import SessionLimits, check_memory

if TYPE_CHECKING:
    from optkit.runtime.generate import GenerationResult, StreamEvent
    from optkit.runtime.tokenizer import Tokenizer

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]

KV_CHUNK = 32  # tokens the cache is rounded up to
GROWTH = 4  # an outgrown cache gets a quarter more, so that copying stays a fraction of the work


class Session(abc.ABC):
    """One open model and its cache; see the module's docstring for the contract.

    Attributes:
        spec: the model's facts.
        max_seq_len: tokens per row that fit.
        directory: where tokenizer and generation defaults are.
        limits: as given to :func:`open_session`.
    """

    backend = ""
    recurrent = False  # has state that cannot be truncated
    rope_switch: int | None = None
    top = 0  # the caller of decode looks at so many of the largest logits only; 0: at all

    def __init__(self, spec: ModelSpec, directory: Path, max_seq_len: int, limits: SessionLimits) -> None:
        self.spec = spec
        self.directory = directory
        self.limits = limits
        self.max_seq_len = min(max_seq_len, limits.max_seq_len or max_seq_len)
        self.capacity = 0  # tokens per row the cache has room for
        self._rows: list[list[int]] = []  # tokens in the cache
        self._longest = 0

    # ── what a backend implements; lengths and tokens are kept here ───────────────────────────────────────────────────

    @abc.abstractmethod
    def cache_bytes(self, batch: int, length: int) -> int:
        """Bytes of the cache for ``batch`` rows of ``length`` tokens."""

    @abc.abstractmethod
    def _allocate(self, batch: int, capacity: int) -> None:
        """Makes an empty cache for ``batch`` rows; may keep the memory it has if that is large enough."""

    @abc.abstractmethod
    def _resize(self, capacity: int) -> None:
        """Makes room for ``capacity`` tokens per row and keeps the content."""

    @abc.abstractmethod
    def _extend(self, ids: Ids, counts: Ids, every: bool) -> Logits:
        """Appends ``ids[b, :counts[b]]`` to each row (0 is allowed).

        Returns:
            ``[B, V]`` of each row's last new token, or ``[B, S, V]`` when ``every``. Rows and positions without a token are
            unspecified.
        """

    @abc.abstractmethod
    def _step(self, tokens: Ids) -> Logits:
        """Appends one token to every row; ``[B, V]``, perhaps a buffer that the next call overwrites."""

    @abc.abstractmethod
    def _truncate(self, lengths: Ids) -> None: ...

    @abc.abstractmethod
    def _select(self, rows: Ids) -> None: ...

    # ── state ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def batch(self) -> int:
        """Rows in the cache."""
        return len(self._rows)

    @property
    def lengths(self) -> Ids:
        """Cached tokens of each row, int64 ``[B]``."""
        return np.array([len(row) for row in self._rows], np.int64)

    @property
    def cached_tokens(self) -> list[list[int]]:
        """The tokens in the cache, by row."""
        return [list(row) for row in self._rows]

    @property
    def kv_bytes(self) -> int:
        """Bytes of key/value cache that are allocated now."""
        return self.cache_bytes(self.batch, self.capacity) if self.batch else 0

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Loaded when first used.

        Raises:
            ArtifactError: the directory has none.
        """
        from optkit.runtime.tokenizer import Tokenizer

        return Tokenizer(self.directory)

    @property
    def has_tokenizer(self) -> bool:
        return (self.directory / "tokenizer.json").is_file()

    @cached_property
    def generation_defaults(self) -> Mapping[str, Any]:
        """The directory's ``generation_config.json``."""
        path = self.directory / "generation_config.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    # ── the contract ──────────────────────────────────────────────────────────────────────────────────────────────────

    def reset(self) -> None:
        """Forgets every token. Memory is kept for the next prefill."""
        self._rows, self._longest = [], 0

    def prefill(
        self, input_ids: ArrayLike, lengths: ArrayLike | None = None, logits: str = "last", capacity: int | None = None
    ) -> Logits:
        """Starts new sequences, forgetting the old ones.

        Args:
            input_ids: int64 ``[B, S]``, right padded.
            lengths: valid tokens of each row ``[B]``; ``None`` means S everywhere.
            logits: ``last`` for each row's last valid token, ``all`` for every position (zeros where padded).
            capacity: tokens per row to make room for, this prompt included; the cache grows by itself if it is outgrown.

        Returns:
            float32 ``[B, V]``, or ``[B, S, V]`` for ``all``.

        Raises:
            LimitError: prompt, batch or cache do not fit.
            EngineError: the engine failed or answered with NaN or infinity.
        """
        ids, counts = self._checked(input_ids, lengths, minimum=1)
        longest = int(counts.max())
        self.check_fits(longest, 0, len(ids))
        self.reset()
        self._reserve_new(len(ids), max(longest, min(capacity or 0, self.max_seq_len)))
        self._rows = [[] for _ in range(len(ids))]
        return self._append(ids, counts, logits)

    def open_rows(self, batch: int, capacity: int) -> None:
        """Starts ``batch`` empty rows with room for ``capacity`` tokens each, forgetting the old ones; ``extend`` fills them.

        Raises:
            LimitError: they do not fit.
        """
        self.check_fits(capacity, 0, batch)
        self.reset()
        self._reserve_new(batch, capacity)
        self._rows = [[] for _ in range(batch)]

    def extend(self, input_ids: ArrayLike, lengths: ArrayLike | None = None, logits: str = "last") -> Logits:
        """Appends 0..S tokens to each row; arguments and results as for :meth:`prefill`."""
        ids, counts = self._checked(input_ids, lengths, minimum=0)
        self._check_rows(len(ids))
        if counts.max() == 0:
            raise UsageError("extend: no row brings a token")
        return self._append(ids, counts, logits)

    def decode(self, token_ids: ArrayLike, copy: bool = True, top: int = 0) -> Logits:
        """Appends one token per row ``[B]`` → ``[B, V]``, or k tokens ``[B, k]`` → ``[B, k, V]``.

        Args:
            token_ids: int64.
            copy: ``False`` returns the engine's own buffer for ``[B]``, which the next call overwrites.
            top: the caller looks at the ``top`` largest logits of ``[B]`` only (and those equal to the last of them), so a
                backend may give -inf for all others; 0 asks for all.
        """
        tokens = np.asarray(token_ids, np.int64)
        if tokens.ndim == 2:
            return self.extend(tokens, logits="all")
        rows = self._rows
        if tokens.shape != (len(rows),):
            self._check_rows(len(tokens) if tokens.ndim == 1 else -1)
        longest = self._longest + 1
        if longest > self.max_seq_len:
            self.check_fits(self._longest, 1, len(rows))
        if self.rope_switch is not None and any(len(row) == self.rope_switch for row in rows):
            return self.extend(tokens[:, None])
        if longest > self.capacity:
            self._grow(longest)
        self.top = top
        result = self._step(tokens)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.append(token)
        self._longest = longest
        self._check_finite(result)
        return result.copy() if copy else result

    def truncate(self, lengths: ArrayLike) -> None:
        """Keeps the first ``lengths[b]`` tokens of each row.

        Raises:
            UnsupportedError: the model has recurrent state, of which only everything can be forgotten.
            UsageError: a row is not that long.
        """
        wanted = np.asarray(lengths, np.int64)
        self._check_rows(len(wanted))
        now = self.lengths
        if (wanted < 0).any() or (wanted > now).any():
            raise UsageError(f"truncate to {wanted.tolist()}: the rows have {now.tolist()} tokens")
        if (wanted == now).all():
            return
        if self.recurrent and (wanted[wanted < now] > 0).any():
            raise UnsupportedError(
                "truncate: this model keeps a recurrent state, which cannot forget its last tokens; prefill again"
            )
        kept = [row[:n] for row, n in zip(self._rows, wanted.tolist(), strict=True)]
        again = self._crossing(now, wanted)
        self._truncate(np.where(again, 0, wanted))
        self._rows = [[] if b else row for row, b in zip(kept, again, strict=True)]
        self._longest = max(map(len, self._rows))
        if again.any():  # read under the other rotary table
            counts = np.where(again, wanted, 0)
            if counts.max() > 0:
                self._append(_padded(kept, counts), counts, "last")

    def select(self, rows: ArrayLike) -> None:
        """Row i becomes old row ``rows[i]``; rows may be dropped, reordered and repeated."""
        wanted = np.asarray(rows, np.int64)
        if wanted.ndim != 1 or not len(wanted) or (wanted < 0).any() or (wanted >= self.batch).any():
            raise UsageError(f"select {wanted.tolist()}: one or more of the rows 0..{self.batch - 1}")
        if len(wanted) > self.batch:
            self._check_budget(len(wanted), self.capacity)
        if not np.array_equal(wanted, np.arange(self.batch)):
            self._select(wanted)
            self._rows = [list(self._rows[i]) for i in wanted.tolist()]
            self._longest = max(map(len, self._rows))

    def reserve(self, capacity: int) -> None:
        """Makes room for ``capacity`` tokens per row, so that the cache need not grow on the way."""
        if capacity > self.capacity:
            self._grow(min(capacity, self.max_seq_len), exactly=True)

    def warmup(self, prompt_tokens: int = 8) -> None:
        """Runs one prefill and one decode, so that the first request does not pay for first-time work; forgets everything."""
        count = max(1, min(prompt_tokens, self.max_seq_len - 1))
        self.prefill(np.zeros((1, count), np.int64))
        if count < self.max_seq_len:
            self.decode(np.zeros(1, np.int64))
        self.reset()

    def generate(self, prompts: Any, **options: Any) -> GenerationResult:
        """Text or tokens for one or many prompts; see :func:`optkit.runtime.generate.generate`."""
        from optkit.runtime.generate import generate

        return generate(self, prompts, **options)

    def stream(self, prompts: Any, **options: Any) -> Iterator[StreamEvent]:
        """The same, as an iterator of events while tokens are chosen; see :func:`optkit.runtime.generate.stream`."""
        from optkit.runtime.generate import stream

        return stream(self, prompts, **options)

    def close(self) -> None:  # noqa: B027  optional for a backend
        """Frees the engine's memory; the session cannot be used afterwards."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ── limits ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def check_fits(self, prompt: int, new: int, batch: int) -> None:
        """Raises LimitError if ``batch`` rows of ``prompt + new`` tokens do not fit; nothing is allocated."""
        if prompt + new > self.max_seq_len:
            raise LimitError(
                f"a prompt of {prompt} tokens and max_new_tokens {new} need {prompt + new} positions, and max_seq_len is "
                f"{self.max_seq_len}: shorten the prompt, lower max_new_tokens, or export with a larger max_seq_len"
            )
        if self.limits.max_batch is not None and batch > self.limits.max_batch:
            raise LimitError(f"a batch of {batch} rows: max_batch is {self.limits.max_batch}; send fewer at a time")
        self._check_budget(batch, self._rounded(prompt + new))

    def _check_budget(self, batch: int, capacity: int) -> None:
        check_memory(
            self.cache_bytes(batch, capacity), self.limits.memory_limit, f"the cache for {batch} rows of {capacity} tokens"
        )

    def _rounded(self, tokens: int) -> int:
        return min(-(-tokens // KV_CHUNK) * KV_CHUNK, max(self.max_seq_len, tokens))

    def _reserve_new(self, batch: int, tokens: int) -> None:
        capacity = self._rounded(tokens)
        self._check_budget(batch, capacity)
        self.capacity = capacity
        self._allocate(batch, capacity)

    def _grow(self, tokens: int, exactly: bool = False) -> None:
        extra = 0 if exactly else self.capacity // GROWTH
        capacity = self._rounded(min(tokens + extra, self.max_seq_len))
        self._check_budget(self.batch, capacity)
        self._resize(capacity)
        self.capacity = capacity

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _checked(self, input_ids: ArrayLike, lengths: ArrayLike | None, minimum: int) -> tuple[Ids, Ids]:
        ids = np.asarray(input_ids)
        if ids.ndim != 2 or not ids.size or ids.dtype.kind not in "iu":
            raise UsageError(f"input_ids: integers of shape [B, S] with B and S at least 1, not {ids.dtype} {list(ids.shape)}")
        counts = np.full(len(ids), ids.shape[1], np.int64) if lengths is None else np.asarray(lengths, np.int64)
        if counts.shape != (len(ids),) or (counts < minimum).any() or (counts > ids.shape[1]).any():
            raise UsageError(f"lengths {counts.tolist()}: one number in {minimum}..{ids.shape[1]} for each of {len(ids)} rows")
        ids = ids.astype(np.int64, copy=False)
        valid = ids[np.arange(ids.shape[1]) < counts[:, None]]
        if valid.size and (valid.min() < 0 or valid.max() >= self.spec.vocab_size):
            wrong = valid.min() if valid.min() < 0 else valid.max()
            raise UsageError(f"token {wrong}: the model has tokens 0..{self.spec.vocab_size - 1}")
        return ids, counts

    def _check_rows(self, given: int) -> None:
        if not self._rows:
            raise UsageError("nothing is in the cache: call prefill first")
        if given != len(self._rows):
            raise UsageError(f"one token per row is needed: the cache has {len(self._rows)} rows, not {given}")

    def _append(self, ids: Ids, counts: Ids, logits: str) -> Logits:
        """``extend`` after the checks: limits, room, the rotary switch, chunks."""
        if logits not in ("last", "all"):
            raise UsageError(f"logits {logits!r}: last or all")
        before = self.lengths
        total = before + counts
        self.check_fits(int(before.max()), int((total - before.max()).max()), len(ids))
        if total.max() > self.capacity:
            self._grow(int(total.max()))
        again = self._crossing(before, total)
        width = ids.shape[1]
        if again.any():  # those rows bring all their tokens
            full = [row + ids[b, : counts[b]].tolist() for b, row in enumerate(self._rows)]
            news = [full[b] if again[b] else full[b][before[b] :] for b in range(len(ids))]
            self._truncate(np.where(again, 0, before))
            self._rows = [[] if b else row for row, b in zip(self._rows, again, strict=True)]
            run_counts = np.array([len(new) for new in news], np.int64)
            result = self._in_chunks(_padded(news, run_counts), run_counts, logits == "all")
            if logits == "all":
                result = _shifted(result, np.where(again, before, 0), counts, width)
        else:
            result = self._in_chunks(ids, counts, logits == "all")
        if logits == "all":
            result[np.arange(width) >= counts[:, None]] = 0.0
        elif (counts == 0).any():
            result[counts == 0] = 0.0
        return result

    def _crossing(self, before: Ids, after: Ids) -> NDArray[np.bool_]:
        """Rows with cached tokens that were read under another rotary table than the new length asks for."""
        if self.rope_switch is None:
            return np.zeros(len(before), bool)
        return (before > 0) & ((before > self.rope_switch) != (after > self.rope_switch))

    def _in_chunks(self, ids: Ids, counts: Ids, every: bool) -> Logits:
        """Reads ``ids`` at most ``prefill_chunk`` columns at a time; a private copy of the logits."""
        width = ids.shape[1] if every else int(counts.max())
        result: Logits | None = None
        for start, stop in self._spans(int(counts.max())):
            columns = ids[:, start:stop]
            part = np.clip(counts - start, 0, stop - start)
            piece = self._extend(np.ascontiguousarray(columns), part, every)
            for row, new, count in zip(self._rows, columns.tolist(), part.tolist(), strict=True):
                row.extend(new[:count])
            self._longest = max(map(len, self._rows))
            self._check_finite(piece[np.arange(stop - start) < part[:, None]] if every else piece[part > 0])
            if result is None:
                result = np.zeros((len(ids), width, piece.shape[-1]) if every else piece.shape, np.float32)
            if every:
                result[:, start:stop] = piece
            else:
                result[part > 0] = piece[part > 0]
        assert result is not None, "some row has a token"
        return result

    def _spans(self, longest: int) -> Iterator[tuple[int, int]]:
        """Column ranges; the first one reaches beyond the rotary switch if the prompt does."""
        chunk = self.limits.prefill_chunk
        first = chunk if self.rope_switch is None or longest <= self.rope_switch else max(chunk, self.rope_switch + 1)
        start = 0
        while start < longest:
            stop = min(longest, start + (chunk if start else first))
            yield start, stop
            start = stop

    def _check_finite(self, logits: Logits) -> None:
        """The maximum shows NaN and +inf; -inf for single tokens is legal."""
        if logits.size and not math.isfinite(logits.max()):
            rows = [b for b, row in enumerate(logits) if not np.isfinite(np.max(row))]
            raise EngineError(
                f"{self.directory}: backend {self.backend} answered with NaN or infinity in row {rows[0]} after "
                f"{self.lengths.tolist()} tokens: the graph overflows (try dtype fp32 or bf16) or the weights are damaged"
            )


def _padded(rows: Sequence[Sequence[int]], counts: Ids) -> Ids:
    """Right-padded ``[B, max(counts)]`` with the first ``counts[b]`` tokens of each row."""
    ids = np.zeros((len(rows), int(counts.max())), np.int64)
    for b, count in enumerate(counts.tolist()):
        ids[b, :count] = rows[b][:count]
    return ids


def _shifted(logits: Logits, starts: Ids, counts: Ids, width: int) -> Logits:
    """``[B, width, V]``: of each row the ``counts[b]`` positions from ``starts[b]`` on."""
    result = np.zeros((len(logits), width, logits.shape[-1]), np.float32)
    for b, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        result[b, :count] = logits[b, start : start + count]
    return result
