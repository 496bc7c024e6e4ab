"""An engine's bindings and one execution context, behind names the session uses. The library's API is called here only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optkit import io_spec
from optkit.errors import ArtifactError, EngineError, LimitError
from optkit.io_spec import GraphSpec
from optkit.runtime.backends._trt_device import Buffer, Captured, Device
from optkit.runtime.base import Logits

#: names of the library's data types -> bytes per element and numpy type (bfloat16 is read as its 16 bits)
DTYPES: dict[str, Any] = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "BF16": np.uint16,
    "INT8": np.int8,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
}


class Bindings:
    """What an engine takes and gives, asked once, and compared with the graph's contract.

    Raises:
        ArtifactError: the engine is not one of this contract; says what differs.
    """

    def __init__(self, engine: Any, graph: GraphSpec, directory: Path) -> None:
        self.engine = engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self.inputs = [n for n in names if _is(engine.get_tensor_mode(n), "INPUT")]
        self.outputs = [n for n in names if n not in self.inputs]
        self.dtype = {n: DTYPES[_enum(engine.get_tensor_dtype(n))] for n in names}
        self.bfloat16 = {n for n in names if _is(engine.get_tensor_dtype(n), "BF16")}
        self.shape = {n: tuple(engine.get_tensor_shape(n)) for n in names}
        self.alias = {n: engine.get_aliased_input_tensor(n) for n in self.outputs}
        if graph.layout == "growing":
            self._check_growing(graph, directory)
        else:
            self._check(graph, directory)
        host = [n for n in self.inputs if not _is(engine.get_tensor_location(n), "DEVICE")]
        if host:
            raise ArtifactError(
                f"{directory}: the engine wants {', '.join(host)} in host memory, which optkit's graphs never do"
            )
        high = self.range(io_spec.INPUT_IDS, 0)[2]
        self.max_batch, self.max_prefill = int(high[0]), int(high[1])
        self.vocab = self.shape[io_spec.LOGITS][-1]
        self.positions = io_spec.LOGITS_POSITIONS in self.inputs
        self.last_only = not self.positions and self.shape[io_spec.LOGITS][1] == 1

    def range(self, name: str, profile: int) -> tuple[Any, Any, Any]:
        """(min, opt, max) shape of an input in a profile."""
        low, best, high = self.engine.get_tensor_profile_shape(name, profile)
        return tuple(low), tuple(best), tuple(high)

    def row_bytes(self, name: str) -> int:
        return int(np.prod(self.shape[name][1:])) * np.dtype(self.dtype[name]).itemsize

    def sizes(self, name: str, rows: int, past: int) -> tuple[int, ...]:
        """The shape of a cache for ``rows`` rows, ``past`` tokens where it grows."""
        return (rows, *(past if size == -1 else size for size in self.shape[name][1:]))

    def _check_inputs(self, graph: GraphSpec, directory: Path, needed: set[str], optional: set[str]) -> None:
        caches = {c.past for c in graph.caches}
        missing = sorted((needed | caches) - set(self.inputs))
        extra = sorted(set(self.inputs) - needed - optional - caches)
        if missing or extra:
            raise ArtifactError(
                f"{directory}: the engine lacks the inputs {missing} and has {extra} beyond the contract; "
                "build it again from this artifact"
            )

    def _check_growing(self, graph: GraphSpec, directory: Path) -> None:
        self._check_inputs(
            graph, directory, {io_spec.INPUT_IDS, io_spec.ATTENTION_MASK}, {io_spec.POSITION_IDS, io_spec.LOGITS_POSITIONS}
        )
        shared = [c.present for c in graph.caches if self.alias.get(c.present) is not None]
        if shared:
            raise ArtifactError(f"{directory}: {shared[0]} shares memory with an input, and a growing cache has its own")

    def _check(self, graph: GraphSpec, directory: Path) -> None:
        caches = {c.past: c.present for c in graph.caches}
        self._check_inputs(
            graph,
            directory,
            {io_spec.INPUT_IDS, io_spec.POSITION_IDS, io_spec.WRITE_INDICES},
            {io_spec.LOGITS_POSITIONS, io_spec.QUERY_LENS},
        )
        for past, present in caches.items():
            if self.alias.get(present) != past:
                raise ArtifactError(f"{directory}: the engine does not update {past} in place ({present}); export it again")
            if self.shape[past][2] != graph.max_seq_len:
                raise ArtifactError(
                    f"{directory}: the engine's cache has {self.shape[past][2]} slots, the artifact says {graph.max_seq_len}"
                )


def _enum(value: Any) -> str:
    """The member's name of a library enum, ``DataType.HALF`` -> ``HALF``."""
    return str(value).rpartition(".")[2]


def _is(value: Any, name: str) -> bool:
    return _enum(value) == name


class Context:
    """One execution context with one profile: its small buffers, the shapes it last ran with, and its graph."""

    def __init__(self, engine: Any, bindings: Bindings, device: Device, profile: int, directory: Path) -> None:
        self.bindings, self.device, self.profile, self.directory = bindings, device, profile, directory
        self.context = engine.create_execution_context()
        if self.context is None:
            raise LimitError(f"{directory}: the engine could not create an execution context; the device has too little memory")
        if not self.context.set_optimization_profile_async(profile, device.stream):
            raise EngineError(f"{directory}: the engine does not take its optimization profile {profile}")
        self._buffers: dict[str, Buffer] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._held: dict[str, NDArray[Any]] = {}  # what was uploaded last
        self._graph: Captured | None = None
        self._runs = 0  # with the present shapes and addresses
        self.graph_state = "not captured yet"

    def bind_caches(self, addresses: dict[str, int]) -> None:
        """Where every past and present cache is; a captured graph does not outlive a change."""
        if addresses == self._addresses:
            return
        self._changed()
        for name, address in addresses.items():
            if address != self._addresses.get(name) and not self.context.set_tensor_address(name, address):
                raise EngineError(f"{self.directory}: the engine does not take an address for {name}")
        self._addresses = dict(addresses)

    def _changed(self) -> None:
        """Shapes or addresses are not what a captured graph has."""
        if self._graph is not None:
            self._graph.destroy()
            self.graph_state = "not captured yet"
        self._graph, self._runs = None, 0

    def run(self, values: dict[str, NDArray[Any]], rows: int, past: int = 0, graph: bool = False) -> None:
        """One run with small inputs ``values`` (those the engine does not have are left out).

        Args:
            values: name -> array; converted to the engine's type, uploaded when it is not what was uploaded last.
            rows: of the caches.
            past: cached tokens, where the cache grows.
            graph: capture the run, or launch what was captured.
        """
        values = {name: value for name, value in values.items() if name in self.bindings.inputs}
        self._set_shapes({name: value.shape for name, value in values.items()}, rows, past)
        for name, value in values.items():
            array = np.ascontiguousarray(value, self.bindings.dtype[name])
            held = self._held.get(name)
            if held is None or not np.array_equal(held, array):
                self.device.upload(self._buffers[name].address, array)
                self._held[name] = array.copy()
        self._enqueue(graph)

    def _enqueue(self, graph: bool) -> None:
        if graph and self._graph is not None:
            self._graph.launch()
            return
        self._execute()
        self._runs += 1
        if graph and self._runs == 1:
            self._capture()

    def _execute(self) -> None:
        if not self.context.execute_async_v3(self.device.stream):
            raise EngineError(f"{self.directory}: TensorRT did not run the engine (shapes {self._shapes})")

    def _capture(self) -> None:
        """After one ordinary run, which did the first-time work that may not be captured. The capture itself runs nothing."""
        capturable = getattr(self.context, "is_stream_capturable", None)
        if capturable is not None and not capturable(self.device.stream):
            self.graph_state = "the engine says its work cannot be captured"
            return
        self._graph = self.device.capture(self._execute)
        self.graph_state = "captured" if self._graph is not None else f"device {self.device.name} has no graphs"

    def _set_shapes(self, shapes: dict[str, tuple[int, ...]], rows: int, past: int) -> None:
        wanted = {**shapes, **{n: self.bindings.sizes(n, rows, past) for n in self.bindings.inputs if n not in shapes}}
        if wanted == self._shapes:
            return
        self._changed()
        for name, shape in wanted.items():
            if not self.context.set_input_shape(name, shape):
                low, _, high = self.bindings.range(name, self.profile)
                raise LimitError(
                    f"{self.directory}: {name} {list(shape)} is outside the engine's profile {list(low)}..{list(high)}"
                )
        missing = self.context.infer_shapes()
        if missing:
            raise EngineError(f"{self.directory}: the engine still misses the shape of {', '.join(missing)}")
        self._shapes = wanted
        for name in (*shapes, io_spec.LOGITS):
            nbytes = int(np.prod(self.context.get_tensor_shape(name))) * np.dtype(self.bindings.dtype[name]).itemsize
            self._reserve(name, nbytes)

    def _reserve(self, name: str, nbytes: int) -> None:
        held = self._buffers.get(name)
        if held is not None and held.nbytes >= nbytes:
            return
        if held is not None:
            self.device.synchronize()
            self.device.free(held)
        self._buffers[name] = self.device.allocate(nbytes)
        self._held.pop(name, None)
        self._changed()
        if not self.context.set_tensor_address(name, self._buffers[name].address):
            raise EngineError(f"{self.directory}: the engine does not take an address for {name}")

    def logits(self, column: int | None = None) -> Logits:
        """Float32 ``[B, N, V]`` of the last run, or ``[B, 1, V]`` of one of its columns; waits for it."""
        shape = tuple(self.context.get_tensor_shape(io_spec.LOGITS))
        address, dtype = self._buffers[io_spec.LOGITS].address, np.dtype(self.bindings.dtype[io_spec.LOGITS])
        if column is None or shape[1] == 1:
            raw = np.empty(shape, dtype)
            self.device.download(raw, address)
        else:
            raw = np.empty((shape[0], 1, shape[2]), dtype)
            for row in range(shape[0]):
                self.device.download(raw[row], address + (row * shape[1] + column % shape[1]) * shape[2] * dtype.itemsize)
        self.device.synchronize()
        return self._float32(raw)

    def largest(self, count: int) -> tuple[Logits, NDArray[np.int64]] | None:
        """The ``count`` largest logits of each row of a run with one column, and their tokens, found on the device.

        Returns:
            float32 ``[B, count]`` in falling order and int64 ``[B, count]``; ``None`` where the device cannot.
        """
        rows, columns, vocab = tuple(self.context.get_tensor_shape(io_spec.LOGITS))
        if columns != 1 or count > vocab:
            return None
        kind = "bfloat16" if io_spec.LOGITS in self.bindings.bfloat16 else np.dtype(self.bindings.dtype[io_spec.LOGITS]).name
        return self.device.largest(self._buffers[io_spec.LOGITS].address, (rows, vocab), kind, count)

    def _float32(self, raw: NDArray[Any]) -> Logits:
        if io_spec.LOGITS in self.bindings.bfloat16:
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32)

    def close(self) -> None:
        self._changed()
        for buffer in self._buffers.values():
            self.device.free(buffer)
        self._buffers = {}
        del self.context
