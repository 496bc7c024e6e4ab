"""The ``trt`` backend over a plan whose cache grows: ``past [B, Hkv, P, D]`` in, ``present [B, Hkv, P + S, D]`` out.

The second choice beside the static cache: a step copies the whole cache, shapes change with every token (so no CUDA graph fits
twice), and the logits of all new positions are computed. It is there for models that cannot be written with the static one.

**Memory.** Every cache tensor has two buffers that swap roles after each run: what was written is read next. They are as long
as the request needs (``capacity``) and one run's new tokens, and are replaced by longer ones when they are outgrown.

**Rows.** The graph is left padded: row ``b``'s tokens are the last ``lengths[b]`` of P columns, and P is the longest row. After
anything that breaks this (rows that bring different numbers of tokens, that are truncated, dropped, or repeated) the rows are
moved to the right edge again, one copy per row and head. A prompt of a first run is padded on the left; rows that go on by
different numbers are padded on the *right* for that run, so that no gap separates a row's tokens and windows stay right.
For one run P + S may exceed ``max_seq_len`` (a full row's neighbours go on), which the profiles allow for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from optkit import io_spec
from optkit.errors import LimitError
from optkit.io_spec import CacheSpec
from optkit.runtime.backends._trt_device import Buffer
from optkit.runtime.backends._trt_engine import Context
from optkit.runtime.backends.trt import TrtSession
from optkit.runtime.base import Ids, Logits


class GrowingSession(TrtSession):
    """As :class:`TrtSession`, for layout ``growing``."""

    layout = "growing"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._pairs: dict[str, list[Buffer]] = {}  # past name -> [what is read, what is written]
        self._columns = 0  # P
        self._rows_held, self._columns_held = 0, 0  # what the buffers have room for

    def cache_bytes(self, batch: int, length: int) -> int:
        """Both buffers."""
        return 2 * self.graph.cache_bytes(batch, length)

    @property
    def kv_bytes(self) -> int:
        return sum(buffer.nbytes for pair in self._pairs.values() for buffer in pair)

    @property
    def cuda_graph(self) -> str:
        return "a growing cache has other shapes in every step"

    # ── what the base asks ────────────────────────────────────────────────────────────────────────────────────────────

    def _allocate(self, batch: int, capacity: int) -> None:
        self._columns = 0
        self._make_room(batch, capacity)

    def _resize(self, capacity: int) -> None:
        self._make_room(self.batch, capacity)

    def _extend(self, ids: Ids, counts: Ids, every: bool) -> Logits:
        before = self.lengths
        rows, width = ids.shape
        if width > self.bindings.max_prefill:
            raise LimitError(f"{width} tokens at once: the engine's prefill profile takes {self.bindings.max_prefill}")
        lead = width - counts if not before.any() else np.zeros(rows, np.int64)  # [B] padding before a row's new tokens
        columns = np.arange(width)[None]
        new = (columns >= lead[:, None]) & (columns < (lead + counts)[:, None])  # [B, S]
        placed = np.zeros_like(ids)
        placed[new] = ids[columns < counts[:, None]]
        self._run_columns(self._prefill, placed, new)
        if every:
            logits = self._prefill.logits()
            result = np.stack([np.roll(row, -start, axis=0) for row, start in zip(logits, lead.tolist(), strict=True)])
        elif (lead + counts == width).all():
            result = self._prefill.logits(-1)[:, 0]
        else:
            result = self._prefill.logits()[np.arange(rows), np.maximum(lead + counts - 1, 0)]
        if not new[:, -1].all():
            self._align(np.arange(rows), self._columns - width + lead + counts, before + counts)
        return result

    def _step(self, tokens: Ids) -> Logits:
        self._run_columns(self._decode, tokens[:, None], np.ones((len(tokens), 1), bool))
        return self._chosen(self._decode)

    def _truncate(self, lengths: Ids) -> None:
        ends = np.full(len(lengths), self._columns) - (self.lengths - lengths)
        self._align(np.arange(len(lengths)), ends, lengths)

    def _select(self, rows: Ids) -> None:
        self._align(rows, np.full(len(rows), self._columns), self.lengths[rows])

    def close(self) -> None:
        for pair in self._pairs.values():
            for buffer in pair:
                self.device.free(buffer)
        self._pairs = {}
        super().close()

    # ── runs and memory ───────────────────────────────────────────────────────────────────────────────────────────────

    def _run_columns(self, context: Context, ids: Ids, new: Any) -> None:
        """Feeds ``ids [B, S]`` of which ``new`` are tokens; P grows by S and the buffers swap."""
        rows, width = ids.shape
        past = self._columns
        self._make_room(rows, past + width)
        held = np.arange(past)[None] >= past - self.lengths[:, None]
        mask = np.concatenate([held, new], axis=1).astype(np.int64)
        values = {
            io_spec.INPUT_IDS: ids,
            io_spec.ATTENTION_MASK: mask,
            io_spec.POSITION_IDS: np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, past:],
            io_spec.LOGITS_POSITIONS: np.arange(width),
        }
        addresses = {}
        for cache in self.graph.caches:
            read, written = self._pairs[cache.past]
            addresses[cache.past], addresses[cache.present] = read.address, written.address
        context.bind_caches(addresses)
        context.run(values, rows, past)
        for pair in self._pairs.values():
            pair.reverse()
        self._columns = past + width

    def _line(self, cache: CacheSpec) -> tuple[int, int]:
        """Heads, and bytes of one head's column."""
        shape = self.bindings.shape[cache.past]
        return int(shape[1]), int(shape[3]) * np.dtype(self.bindings.dtype[cache.past]).itemsize

    def _make_room(self, rows: int, columns: int) -> None:
        """Buffers for so many; what is in the cache stays."""
        if rows <= self._rows_held and columns <= self._columns_held:
            return
        rows, columns = max(rows, self._rows_held), max(columns, self._columns_held)
        for cache in self.graph.caches:
            heads, line = self._line(cache)
            fresh = [self.device.allocate(rows * heads * columns * line) for _ in range(2)]
            old = self._pairs.get(cache.past)
            if old is not None:
                used = self.batch * heads * self._columns * line
                if used:
                    self.device.copy(fresh[0].address, old[0].address, used)
                self.device.synchronize()
                for buffer in old:
                    self.device.free(buffer)
            self._pairs[cache.past] = fresh
        self._rows_held, self._columns_held = rows, columns

    def _align(self, sources: Ids, ends: Ids, lengths: Ids) -> None:
        """Row i becomes the ``lengths[i]`` columns of old row ``sources[i]`` that end at ``ends[i]``, at the right edge."""
        longest, old = int(lengths.max(initial=0)), self._columns
        self._make_room(len(sources), longest)
        for cache in self.graph.caches:
            heads, line = self._line(cache)
            read, written = self._pairs[cache.past]
            for row, (source, end, length) in enumerate(zip(sources.tolist(), ends.tolist(), lengths.tolist(), strict=True)):
                for head in range(heads):
                    start = written.address + (row * heads + head) * longest * line
                    if length < longest:  # a NaN left behind would spread through columns that are masked
                        self.device.zero(start, (longest - length) * line)
                    if length:
                        origin = read.address + ((source * heads + head) * old + end - length) * line
                        self.device.copy(start + (longest - length) * line, origin, length * line)
            self._pairs[cache.past].reverse()
        self._columns = longest
