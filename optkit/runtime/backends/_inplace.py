"""A cache that stays at one address: layouts ``slots`` and ``chunks`` (see ``ort.py``). No engine is imported here."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from optkit import io_spec
from optkit.errors import UnsupportedError
from optkit.io_spec import CacheSpec, GraphSpec

Ids = NDArray[np.int64]
Logits = NDArray[np.float32]

NUMPY: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int8": np.int8,
    "int64": np.int64,
}
BFLOAT16 = 16  # ONNX's number for the type numpy does not have
WASTE = 0.75  # a padded prompt batch with a smaller share of real tokens is read row by row
LONG = 64  # tokens; shorter rows are too small to fill the cores alone
RUN_COST = 4  # a run costs about this many tokens more than it computes (reading the weights; measured on a 4-bit model)


def element_type(dtype: str) -> Any:
    return BFLOAT16 if dtype == "bfloat16" else NUMPY[dtype]


class Buffer:
    """Memory of one cache tensor ``[rows, …]``: a numpy array, or a block on the device."""

    def __init__(self, engine: Any, spec: CacheSpec, rows: int, capacity: int) -> None:
        self.spec = spec
        self.shape = spec.sizes(rows, capacity)
        host = np.zeros(self.shape, NUMPY[spec.dtype])
        self.host = host if engine.device == "cpu" else None
        self.value = None if engine.device == "cpu" else engine.device_buffer(host)
        self.address = host.ctypes.data if self.value is None else self.value.data_ptr()
        self.nbytes = host.nbytes
        self.row_bytes = host.nbytes // rows
        self.fixed = spec.growing_axis is None

    def read(self) -> NDArray[Any]:
        """The content; on the CPU the memory itself."""
        return self.host if self.host is not None else self.value.numpy()  # type: ignore[union-attr]

    def write(self, content: NDArray[Any]) -> None:
        if self.value is not None:
            self.value.update_inplace(content)

    def clear(self, rows: Any) -> None:
        content = self.read()
        content[rows] = 0
        self.write(content)


class InPlaceCache:
    """Buffers, bindings and runs.

    Args:
        engine: makes bindings and runs them (:class:`optkit.runtime.backends.ort._Engine`).
        graph: layout ``slots`` or ``chunks``.
        vocab_size: columns of the logits.
    """

    def __init__(self, engine: Any, graph: GraphSpec, vocab_size: int) -> None:
        if graph.logits_dtype not in ("float32", "float16"):
            raise UnsupportedError(f"logits of type {graph.logits_dtype}: export with float32 or float16 logits")
        self.engine = engine
        self.graph = graph
        self.vocab_size = vocab_size
        self._chunks = graph.layout == "chunks"
        self._positions = graph.optional_logits_positions
        self.buffers: list[Buffer] = []  # of each cache tensor
        self.states: list[Buffer] = []  # second buffer of the fixed-size ones, in their order
        self.rows = self.capacity = 0  # of the memory
        self.batch = 0  # rows in use
        self._step: _Step | None = None  # the bound decode step of the present rows
        self._current = False  # its lengths are those of the rows
        self._bindings: dict[tuple[int, int], Any] = {}  # rows first..stop -> a binding that has their caches

    # ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def allocate(self, batch: int, capacity: int) -> int:
        """An empty cache; keeps the memory when it is large enough and not wastefully larger. Returns the capacity it has."""
        fits = batch <= self.rows and capacity <= self.capacity
        if not fits or self.rows * self.capacity > 2 * batch * capacity:
            self._make(batch, capacity)
        self._use(batch)
        for buffer in self.buffers:
            if buffer.fixed:
                buffer.clear(slice(None))
        return self.capacity

    def resize(self, capacity: int, lengths: Ids) -> None:
        self._rebuild(np.arange(self.batch), capacity, lengths)

    def select(self, rows: Ids, lengths: Ids) -> None:
        """Row i becomes row ``rows[i]``. Rows that stay where they are cost nothing."""
        if len(rows) > self.rows:
            self._rebuild(rows, self.capacity, lengths)
            return
        moved = [(new, old) for new, old in enumerate(rows.tolist()) if new != old]
        if moved:
            targets, sources = [new for new, _ in moved], [old for _, old in moved]
            longest = int(lengths[sources].max())
            for buffer in self.buffers:
                content = buffer.read()
                part = _used(buffer.spec, longest)
                content[targets, *part] = content[sources, *part]
                buffer.write(content)
        self._use(len(rows))

    def truncate(self, lengths: Ids, before: Ids) -> None:
        """Slots beyond a row's length are never read, so only fixed-size states need work (when a row is emptied)."""
        self._current = False
        for buffer in self.buffers:
            if buffer.fixed:
                buffer.clear(np.flatnonzero(lengths == 0))

    def free(self) -> None:
        self._use(0)
        self.buffers, self.states = [], []
        self.rows = self.capacity = 0

    @property
    def nbytes(self) -> int:
        """Bytes of cache memory."""
        return sum(buffer.nbytes for buffer in (*self.buffers, *self.states))

    def addresses(self) -> list[tuple[int, int]]:
        """(past, present) address of every cache tensor; equal for key/value tensors."""
        state = iter(self.states)
        return [(b.address, next(state).address if b.fixed else b.address) for b in self.buffers]

    def _make(self, rows: int, capacity: int) -> None:
        self.free()
        self.buffers = [Buffer(self.engine, spec, rows, capacity) for spec in self.graph.caches]
        self.states = [Buffer(self.engine, buffer.spec, rows, 0) for buffer in self.buffers if buffer.fixed]
        self.rows, self.capacity = rows, capacity

    def _rebuild(self, rows: Ids, capacity: int, lengths: Ids) -> None:
        """New memory with old row ``rows[i]`` in row i."""
        old = self.buffers
        self._make(len(rows), capacity)
        self._use(len(rows))
        longest = int(lengths[rows].max())
        for source, target in zip(old, self.buffers, strict=True):
            content = target.read()
            part = _used(target.spec, longest)
            content[:, *part] = source.read()[rows, *part]
            target.write(content)

    def _use(self, batch: int) -> None:
        """From now on the first ``batch`` rows are in use; what was bound for others is dropped."""
        if batch != self.batch or not batch:
            self._step, self._bindings = None, {}
        self._current = False
        self.batch = batch

    # ── runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, tokens: Ids, rows: list[list[int]]) -> Logits:
        """One token for every row; the returned array is overwritten by the next step."""
        if self._step is None:
            self._step = _Step(self)
        if not self._current:
            self._step.set_lengths([len(row) for row in rows])
            self._current = True
        return self._step.run(tokens)

    def extend(self, ids: Ids, lengths: Ids, counts: Ids, every: bool) -> Logits:
        """``counts[b]`` new tokens of each row in as few runs as the layout allows; see the contract in ``base.py``."""
        self._current = False
        width = ids.shape[1]
        if self._at_once(width, lengths, counts):
            return self._run(ids, lengths, counts, 0, len(ids), every)
        result = np.zeros((len(ids), width, self.vocab_size) if every else (len(ids), self.vocab_size), np.float32)
        alone = counts > 0
        if self._chunks and (singles := counts == 1).sum() > 1:
            alone &= ~singles
            logits = self._run(ids[:, :1], lengths, singles.astype(np.int64), 0, len(ids), every)
            result[singles, ..., :] = (
                logits[singles] if not every else np.pad(logits[singles], ((0, 0), (0, width - 1), (0, 0)))
            )
        for row in np.flatnonzero(alone).tolist():
            count = int(counts[row])
            logits = self._run(ids[row : row + 1, :count], lengths[row : row + 1], counts[row : row + 1], row, row + 1, every)
            if every:
                result[row, :count] = logits[0]
            else:
                result[row] = logits[0]
        return result

    def _at_once(self, width: int, lengths: Ids, counts: Ids) -> bool:
        """One run can, and should, do all rows."""
        even = bool((counts == width).all())
        if self.states:  # padding must not pass through a recurrent state
            return even and (self._chunks or width == 1 or not lengths.any())
        if self._chunks:
            singles, many = np.count_nonzero(counts == 1), counts[counts > 1]
            apart = (len(counts) + RUN_COST) * (singles > 1) + (many.sum() + RUN_COST * len(many)) + RUN_COST * (singles == 1)
            return bool(len(counts) * width + RUN_COST <= apart)
        if even and width == 1:
            return True
        if lengths.any() or not counts.all():
            return False
        return even or width < LONG or counts.sum() >= WASTE * counts.size * width

    def _run(self, ids: Ids, lengths: Ids, counts: Ids, first: int, stop: int, every: bool) -> Logits:
        """One run of rows ``first..stop``."""
        width = ids.shape[1]
        inputs = {io_spec.INPUT_IDS: np.ascontiguousarray(ids), **self.length_inputs(width, lengths, counts)}
        if self._positions:
            inputs[io_spec.LOGITS_POSITIONS] = np.arange(width) if every else np.array([-1])
        binding = self._binding(first, stop)
        for name, array in inputs.items():
            bind_array(binding.bind_input, name, array)
        if self._positions:
            logits = np.empty((len(ids), width if every else 1, self.vocab_size), NUMPY[self.graph.logits_dtype])
            bind_array(binding.bind_output, io_spec.LOGITS, logits)
            self.engine.run(binding)
        else:
            binding.bind_output(io_spec.LOGITS)
            self.engine.run(binding)
            logits = binding.get_outputs()[-1].numpy()
        if self.states:
            self._commit_states(first, stop)
            self._step = None
        logits = logits.astype(np.float32, copy=False)
        if every:
            if logits.shape[1] != width:
                raise UnsupportedError("this graph gives logits for the last token only; export it again to get all of them")
            return logits
        return logits[:, 0] if logits.shape[1] == 1 else logits[np.arange(len(ids)), counts - 1]

    def length_inputs(self, width: int, lengths: Ids, counts: Ids) -> dict[str, Ids]:
        if self._chunks:
            past = np.maximum(lengths, counts == 0)  # the engine refuses a row without any token, idle or not
            return {io_spec.PAST_LENS: past.astype(np.int64), io_spec.QUERY_LENS: counts.astype(np.int64)}
        total = lengths + counts
        columns = width if (lengths == 0).all() else self.capacity
        return {io_spec.ATTENTION_MASK: (np.arange(columns) < total[:, None]).astype(np.int64)}

    def _binding(self, first: int, stop: int) -> Any:
        binding = self._bindings.get((first, stop))
        if binding is None:
            binding = self.engine.binding()
            self.bind_caches(binding, first, stop)
            if not self.states:  # those change roles
                self._bindings[first, stop] = binding
        return binding

    def bind_caches(self, binding: Any, first: int, stop: int) -> None:
        """Binds rows ``first..stop`` of every cache tensor as past and present."""
        state = iter(self.states)
        for buffer in self.buffers:
            shape, kind, device = (stop - first, *buffer.shape[1:]), element_type(buffer.spec.dtype), self.engine.device
            out = next(state) if buffer.fixed else buffer
            offset = first * buffer.row_bytes
            binding.bind_input(buffer.spec.past, device, 0, kind, shape, buffer.address + offset)
            binding.bind_output(buffer.spec.present, device, 0, kind, shape, out.address + offset)

    def _commit_states(self, first: int, stop: int) -> None:
        """After a run of some rows: their new states become the ones that are read."""
        for buffer, fresh in zip([b for b in self.buffers if b.fixed], self.states, strict=True):
            content = buffer.read()
            content[first:stop] = fresh.read()[first:stop]
            buffer.write(content)

    def swap_states(self) -> None:
        """After a step of all rows: the two buffers of each state change roles."""
        fixed = [buffer for buffer in self.buffers if buffer.fixed]
        fresh = iter(self.states)
        self.buffers = [next(fresh) if buffer.fixed else buffer for buffer in self.buffers]
        self.states = fixed


class _Step:
    """A decode step of all rows, bound once. ``run`` writes the tokens and one length per row, and runs."""

    def __init__(self, cache: InPlaceCache) -> None:
        self._cache = cache
        batch = cache.batch
        self._ids = np.zeros((batch, 1), np.int64)
        self._lengths = np.zeros(batch, np.int64)  # before the step
        self._all = np.arange(batch)
        self._inputs = cache.length_inputs(1, self._lengths + 1, np.ones(batch, np.int64))
        self._mask = self._inputs.get(io_spec.ATTENTION_MASK)
        self._past = self._inputs.get(io_spec.PAST_LENS)
        self._logits = np.empty((batch, 1, cache.vocab_size), NUMPY[cache.graph.logits_dtype])
        self._answer = self._logits[:, 0]
        self._bound = [self._bind()]
        if cache.states:
            cache.swap_states()
            self._bound.append(self._bind())
            cache.swap_states()
        self._turn = 0

    def set_lengths(self, lengths: list[int]) -> None:
        self._lengths[:] = lengths
        if self._mask is not None:
            self._mask[:] = np.arange(self._mask.shape[1]) < self._lengths[:, None]

    def run(self, tokens: Ids) -> Logits:
        self._ids[:, 0] = tokens
        if self._mask is not None:
            self._mask[self._all, self._lengths] = 1
        else:
            self._past[:] = self._lengths  # type: ignore[index]
        self._cache.engine.run(self._bound[self._turn])
        self._lengths += 1
        if len(self._bound) == 2:
            self._turn ^= 1
            self._cache.swap_states()
        return self._answer if self._answer.dtype == np.float32 else self._answer.astype(np.float32)

    def _bind(self) -> Any:
        binding = self._cache.engine.binding()
        for name, array in {io_spec.INPUT_IDS: self._ids, **self._inputs}.items():
            bind_array(binding.bind_input, name, array)
        self._cache.bind_caches(binding, 0, self._cache.batch)
        bind_array(binding.bind_output, io_spec.LOGITS, self._logits)
        return binding


def bind_array(bind: Any, name: str, array: NDArray[Any]) -> None:
    """Binds the memory of a numpy array, which the caller keeps alive."""
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def _used(spec: CacheSpec, length: int) -> tuple[Any, ...]:
    """Index of the axes after the batch: the first ``length`` tokens."""
    return tuple(slice(0, length) if axis == spec.growing_axis else slice(None) for axis in range(1, len(spec.shape)))
