"""A cache that the graph returns longer than it got it: layout ``growing``, what most other exporters write.

The past of a run is the present of the one before, handed over without a copy where the engine made it. Rows share one
cached length, so a ragged first prompt is padded on the **left** and the mask keeps the padding out; ``position_ids``, if the
graph has them, count the ones of the mask. Later runs bring the same number of tokens for every row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from optkit import io_spec
from optkit.errors import UnsupportedError
from optkit.io_spec import CacheSpec, GraphSpec
from optkit.runtime.backends._inplace import NUMPY, bind_array

Ids = NDArray[np.int64]
Logits = NDArray[np.float32]


class GrowingCache:
    """Past tensors as the engine's own values, the mask that goes with them, and runs.

    Args:
        engine: makes bindings and runs them.
        graph: layout ``growing``.
        vocab_size: columns of the logits.
    """

    def __init__(self, engine: Any, graph: GraphSpec, vocab_size: int) -> None:
        bad = [c.dtype for c in graph.caches if c.dtype == "bfloat16"]
        if bad:
            raise UnsupportedError("a growing cache of type bfloat16: numpy has no such type; export with float32 or float16")
        self.engine = engine
        self.graph = graph
        self.vocab_size = vocab_size
        self._past: list[Any] = []
        self._mask = np.zeros((0, 0), np.int64)

    @property
    def nbytes(self) -> int:
        return sum(value.tensor_size_in_bytes() for value in self._past)

    def allocate(self, batch: int, capacity: int) -> int:
        self._past = [self._value(np.zeros(spec.sizes(batch, 0), NUMPY[spec.dtype])) for spec in self.graph.caches]
        self._mask = np.zeros((batch, 0), np.int64)
        return capacity

    def resize(self, capacity: int, lengths: Ids) -> None:
        """The graph makes the room."""

    def free(self) -> None:
        self._past = []

    def step(self, tokens: Ids, rows: list[list[int]]) -> Logits:
        return self._run(tokens[:, None], np.ones((len(tokens), 1), np.int64), every=False)[:, -1]

    def extend(self, ids: Ids, lengths: Ids, counts: Ids, every: bool) -> Logits:
        width = ids.shape[1]
        if (counts == width).all():
            logits = self._run(ids, np.ones_like(ids), every)
            return logits if every else logits[:, -1]
        if lengths.any() or not counts.all():
            raise UnsupportedError("rows of a growing cache go on together: bring the same number of tokens for every row")
        left, mask = np.zeros_like(ids), np.zeros_like(ids)
        for row, count in enumerate(counts.tolist()):
            left[row, width - count :] = ids[row, :count]
            mask[row, width - count :] = 1
        logits = self._run(left, mask, every)
        if not every:
            return logits[:, -1]
        result = np.zeros_like(logits)
        for row, count in enumerate(counts.tolist()):
            result[row, :count] = logits[row, width - count :]
        return result

    def truncate(self, lengths: Ids, before: Ids) -> None:
        """All rows lose the same number of tokens."""
        lost = before - lengths
        if (lost != lost[0]).any():
            raise UnsupportedError("rows of a growing cache are truncated together: take the same number from every row")
        keep = self._mask.shape[1] - int(lost[0])
        self._mask = self._mask[:, :keep]
        self._change(lambda spec, content: content[_first(spec, keep)])

    def select(self, rows: Ids, lengths: Ids) -> None:
        self._mask = self._mask[rows]
        self._change(lambda spec, content: content[rows])

    def _change(self, edit: Any) -> None:
        contents = zip(self.graph.caches, self._past, strict=True)
        self._past = [self._value(np.ascontiguousarray(edit(spec, value.numpy()))) for spec, value in contents]

    def _value(self, array: NDArray[Any]) -> Any:
        return self.engine.device_buffer(array)

    def _run(self, ids: Ids, mask: Ids, every: bool) -> Logits:
        """Logits ``[B, S, V]``, or ``[B, 1, V]`` where the graph can leave the others out."""
        self._mask = np.concatenate([self._mask, mask], axis=1)
        feeds = {io_spec.INPUT_IDS: ids, io_spec.ATTENTION_MASK: self._mask}
        if io_spec.POSITION_IDS in self.engine.inputs:
            feeds[io_spec.POSITION_IDS] = np.maximum(np.cumsum(self._mask, axis=1) - 1, 0)[:, -ids.shape[1] :]
        if io_spec.LOGITS_POSITIONS in self.engine.inputs:
            feeds[io_spec.LOGITS_POSITIONS] = np.arange(ids.shape[1]) if every else np.array([-1])
        binding = self.engine.binding()
        feeds = {name: np.ascontiguousarray(array) for name, array in feeds.items() if name in self.engine.inputs}
        for name, array in feeds.items():
            bind_array(binding.bind_input, name, array)
        for spec, value in zip(self.graph.caches, self._past, strict=True):
            binding.bind_ortvalue_input(spec.past, value)
            binding.bind_output(spec.present, self.engine.device)
        binding.bind_output(io_spec.LOGITS)
        self.engine.run(binding)
        *self._past, logits = binding.get_outputs()
        return logits.numpy().astype(np.float32, copy=False)


def _first(spec: CacheSpec, keep: int) -> tuple[slice, ...]:
    return tuple(slice(0, keep) if axis == spec.growing_axis else slice(None) for axis in range(len(spec.shape)))
