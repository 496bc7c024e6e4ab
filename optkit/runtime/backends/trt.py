"""TensorRT and TensorRT-RTX: a plan run through the public API; _trt_growing.py has the cache that grows.

**Binding.** The engine takes addresses: ``set_tensor_address`` for every tensor, ``set_input_shape`` for every input,
``execute_async_v3`` on a stream. Addresses are set when memory changes, shapes when they change; a decode step sets neither.

**The cache is updated in place.** ``present.{i}`` is bound to the address of ``past_key_values.{i}``, and the engine confirms
the pair (``get_aliased_input_tensor``). One cache tensor is ``[B, Hkv, S_max, D]`` with the S_max of the export, whatever the
request needs: memory is ``batch * S_max``. A smaller batch uses the front of the buffer.

**Two contexts**, one for each optimization profile: prefill (1..max new tokens) and decode (one). Switching a context's
profile costs a synchronization, two contexts cost activation memory once more. A decode step of an unchanged batch always has
the same shapes and addresses, so it is captured into a CUDA graph after its first run; :attr:`TrtSession.cuda_graph` says
whether.

**Positions.** A token's position is its slot. A row's new tokens go to ``write_indices[b] ..``, and the mask in the graph lets
a query at position p see the slots 0..p. Padding behind a row's tokens is written too, to slots nobody sees until they are
written again. The engine ignores a write beyond S_max without a word; where a padded row would reach that far, its window is
moved to the left and some cached tokens are given once more, which writes what is there already.

**Logits.** A graph with ``logits_positions`` gives the columns it is asked for, and with ``query_lens`` beside it each row's
last one under the name -1. One without gives each row's last token only; all positions of a prompt are then read one token at a
time, which is exact and slow.

**Choosing on the device.** A caller that only looks at the k largest logits says so (``decode(..., top=k)``: greedy is 1, top-k
sampling k). With ``device_sampling`` the device then finds the k + 1 largest of each row, stream-ordered behind the engine, and
only those are copied; the row handed out has -inf everywhere else. Where the k-th and the next are equal, the whole row is
copied, so the tokens are those of the host. Needs torch for the kernel. Off by default: what it gains on a GPU has not been
measured (benchmarks/gpu_day.py does).

Numbers on a GPU are not proven by this project's tests: they run this file over a stand-in for the engine
(docs/tensorrt.md).
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import numpy as np

from optkit import cuda, io_spec, manifest
from optkit.errors import ArtifactError, EngineError, LimitError, UnsupportedError
from optkit.io_spec import GraphSpec
from optkit.manifest import ModelSpec
from optkit.runtime.backends._trt_device import Buffer, Device, find_device
from optkit.runtime.backends._trt_engine import Bindings, Context
from optkit.runtime.base import Ids, Logits, Session
from optkit.runtime.limits import SessionLimits
from optkit.sidecar import Sidecar, check_sidecar

OPTIONS = ("cuda_graphs", "check_digest", "device_sampling")
PLAN_FILE = "engine.plan"


def open_backend(
    path: str | Path,
    threads: int | None = None,
    limits: SessionLimits | None = None,
    cuda_graphs: bool = True,
    check_digest: bool = True,
    device_sampling: bool = False,
) -> Session:
    """Opens an artifact made for target ``tensorrt`` that has its engine.

    Args:
        path: the directory.
        threads: not used; the work is on the device.
        limits: see :class:`SessionLimits`.
        cuda_graphs: capture decode steps.
        check_digest: compare the plan with its recorded digest (reads the whole file).
        device_sampling: find the largest logits on the device where the caller needs no others; needs torch.

    Raises:
        ArtifactError: no engine, or one for another library version or GPU. UnsupportedError: no GPU here.
        DependencyError: the engine's library, or one for device memory, is not installed.
    """
    directory = Path(path)
    graph, spec = _described(directory)
    plan = directory / PLAN_FILE
    if not plan.is_file():
        raise ArtifactError(
            f"{directory}: has no {PLAN_FILE} yet; build it where the GPU is: optkit export --build-only {directory}"
        )
    engine, device, sidecar = load_engine(plan, check_digest, device_sampling)
    return make_session(engine, device, graph, spec, directory, limits, cuda_graphs, sidecar, device_sampling)


def make_session(
    engine: Any,
    device: Device,
    graph: GraphSpec,
    spec: ModelSpec,
    directory: Path,
    limits: SessionLimits | None = None,
    cuda_graphs: bool = True,
    sidecar: Sidecar | None = None,
    device_sampling: bool = False,
) -> TrtSession:
    """The session for the graph's cache layout; arguments as for :class:`TrtSession`."""
    from optkit.runtime.backends._trt_growing import GrowingSession

    kind = GrowingSession if graph.layout == "growing" else TrtSession
    return kind(engine, device, graph, spec, directory, limits or SessionLimits(), cuda_graphs, sidecar, device_sampling)


def _described(directory: Path) -> tuple[GraphSpec, ModelSpec]:
    read = manifest.read_manifest(directory, kind="artifact")
    try:
        graph = GraphSpec.from_dict(read.facts["graph"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{directory}: {manifest.FILE_NAME} does not describe a graph ({error}); export it again"
        ) from error
    if read.model is None:
        raise ArtifactError(f"{directory}: {manifest.FILE_NAME} says nothing of the model; export it again")
    return graph, read.model


def load_engine(plan: Path, check_digest: bool = True, with_kernels: bool = False) -> tuple[Any, Device, Sidecar]:
    """The deserialized engine, a device for its memory, and the plan's sidecar. Nothing is imported before the driver is seen.

    Raises:
        ArtifactError, DependencyError, UnsupportedError: as for :func:`open_backend`.
        EngineError: the library refuses the plan.
    """
    driver = cuda.find_driver()
    if driver is None:
        raise UnsupportedError(f"{plan}: a TensorRT engine needs an NVIDIA GPU, and {cuda.why_no_driver()}")
    sidecar = check_sidecar(plan, capability=driver.devices[0].capability, digest=check_digest)
    trt = importlib.import_module(sidecar.flavour)
    said: list[str] = []
    runtime = trt.Runtime(_logger(trt, said))
    engine = runtime.deserialize_cuda_engine(plan.read_bytes())
    if engine is None:
        reason = " ".join(" ".join(said[-2:]).split()) or "it gave no reason"
        raise EngineError(f"{plan}: {sidecar.flavour} {trt.__version__} does not load it: {reason}")
    return engine, find_device(with_kernels), sidecar


def _logger(trt: Any, said: list[str]) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                said.append(message)

    return Logger()


class TrtSession(Session):
    """An engine behind the session contract.

    Args:
        engine: an ``ICudaEngine``.
        device: where its memory is.
        graph: the contract of the graph it was built from.
        spec: the model's facts.
        directory: where the tokenizer is.
        limits: as given by the user.
        cuda_graphs: capture decode steps.
        sidecar: the plan's, for people; the engine itself is asked for everything that is computed with.
        device_sampling: let the device find the largest logits.
    """

    backend = "trt"
    layout = "scatter"

    def __init__(
        self,
        engine: Any,
        device: Device,
        graph: GraphSpec,
        spec: ModelSpec,
        directory: Path,
        limits: SessionLimits,
        cuda_graphs: bool = True,
        sidecar: Sidecar | None = None,
        device_sampling: bool = False,
    ) -> None:
        states = sorted({c.role for c in graph.caches} - {"key", "value"})
        if graph.layout != self.layout or states:
            what = f"cache layout {graph.layout}{' with ' + ', '.join(states) if states else ''}"
            raise UnsupportedError(f"{directory}: {what} is not one that backend 'trt' runs; export with target tensorrt")
        self.bindings = Bindings(engine, graph, directory)
        batch, fresh = self.bindings.max_batch, self.bindings.max_prefill
        if graph.rope_switch is not None and graph.rope_switch < graph.max_seq_len and fresh <= graph.rope_switch:
            raise UnsupportedError(
                f"{directory}: the prefill profile takes {fresh} tokens, and this model's rotary table changes at "
                f"{graph.rope_switch}, where a row is read again at once; build with max_prefill {graph.max_seq_len}"
            )
        limits = dataclasses.replace(
            limits, max_batch=min(limits.max_batch or batch, batch), prefill_chunk=min(limits.prefill_chunk, fresh)
        )
        super().__init__(spec, directory, graph.max_seq_len, limits)
        self.graph, self.rope_switch, self.sidecar = graph, graph.rope_switch, sidecar
        self.device = device
        self.slots = graph.max_seq_len
        self._cuda_graphs, self._device_sampling = cuda_graphs, device_sampling
        self._sparse, self._written = np.zeros((0, 0), np.float32), np.zeros((0, 0), np.int64)
        self._caches: dict[str, Buffer] = {}
        self._room = 0  # rows the buffers hold
        self._one, self._first = np.ones(batch, np.int64), np.zeros(1, np.int64)
        self._prefill = Context(engine, self.bindings, device, 0, directory)
        decode = min(1, engine.num_optimization_profiles - 1)
        self._decode = Context(engine, self.bindings, device, decode, directory) if decode else self._prefill

    # ── what the base asks ────────────────────────────────────────────────────────────────────────────────────────────

    def cache_bytes(self, batch: int, length: int) -> int:
        """The cache is static: ``length`` does not matter."""
        return self.graph.cache_bytes(batch, self.slots)

    @property
    def kv_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._caches.values())

    @property
    def cuda_graph(self) -> str:
        """``captured``, or why a decode step is not launched as a CUDA graph."""
        if not self._cuda_graphs:
            return "switched off"
        return self._decode.graph_state

    def _allocate(self, batch: int, capacity: int) -> None:
        if batch > self._room:
            self._move(batch, {})
        for buffer in self._caches.values():  # a NaN left behind would spread through slots that are masked
            self.device.zero(buffer.address, buffer.nbytes)

    def _resize(self, capacity: int) -> None:
        pass  # S_max slots are always there

    def _truncate(self, lengths: Ids) -> None:
        pass  # slots behind a row's length are not seen, and written before they are

    def _select(self, rows: Ids) -> None:
        self._move(len(rows), dict(enumerate(rows.tolist())))

    def _extend(self, ids: Ids, counts: Ids, every: bool) -> Logits:
        before = self.lengths
        rows, width = ids.shape
        if width > self.bindings.max_prefill:
            raise LimitError(f"{width} tokens at once: the engine's prefill profile takes {self.bindings.max_prefill}")
        if every and self.bindings.last_only:
            return self._one_by_one(ids, before, counts)
        # [B] cached tokens given once more, so that no write leaves the cache
        shift = np.maximum(before + width - self.slots, 0)
        if shift.any():
            ids = self._moved(ids, before, shift)
        last = np.maximum(shift + counts - 1, 0)
        one = not every and (self.bindings.last_only or io_spec.QUERY_LENS in self.bindings.inputs)
        wanted = np.arange(width) if every else np.array([-1]) if one else np.unique(last)
        logits = self._run(self._prefill, ids, before - shift, shift + counts, wanted)  # [B, N, V]
        if not every:
            return logits[:, 0] if one else logits[np.arange(rows), np.searchsorted(wanted, last)]
        if shift.any():
            logits = np.stack([np.roll(row, -s, axis=0) for row, s in zip(logits, shift.tolist(), strict=True)])
        return logits

    def _one_by_one(self, ids: Ids, before: Ids, counts: Ids) -> Logits:
        """All positions of a graph that only gives the last one's logits. A row that has ended writes its last token again."""
        rows, width = ids.shape
        result = np.zeros((rows, width, self.bindings.vocab), np.float32)
        previous = np.array([row[-1] if row else 0 for row in self._rows], np.int64)
        for column in range(int(counts.max())):
            taken = np.minimum(column, counts - 1)  # [B]; -1: the row brings nothing
            tokens = np.where(taken >= 0, ids[np.arange(rows), taken], previous)
            starts = np.maximum(before + taken, 0)
            result[:, column] = self._run(self._decode, tokens[:, None], starts, self._one[:rows], self._first)[:, 0]
        return result

    def _moved(self, ids: Ids, before: Ids, shift: Ids) -> Ids:
        """Rows whose window starts ``shift[b]`` slots earlier begin with tokens they have in the cache."""
        moved = ids.copy()
        for b, count in enumerate(shift.tolist()):
            if count:
                start = int(before[b])
                moved[b] = np.concatenate([self._rows[b][start - count : start], ids[b]])[: ids.shape[1]]
        return moved

    def _run(self, context: Context, ids: Ids, starts: Ids, counts: Ids, wanted: Ids) -> Logits:
        """New tokens ``ids[b, :counts[b]]`` at slots ``starts[b] ..``; float32 ``[B, N, V]``, of each row's last token (N = 1)
        where the graph gives only that."""
        self._enqueue(context, ids, starts, counts, wanted, False)
        logits = context.logits()
        return logits if self.bindings.positions or self.bindings.last_only else logits[:, wanted]

    def _enqueue(self, context: Context, ids: Ids, starts: Ids, counts: Ids, wanted: Ids, graph: bool) -> None:
        values: dict[str, Any] = {
            io_spec.INPUT_IDS: ids,
            io_spec.POSITION_IDS: starts[:, None] + np.arange(ids.shape[1]),
            io_spec.WRITE_INDICES: starts,
            io_spec.QUERY_LENS: np.maximum(counts, 1),
            io_spec.LOGITS_POSITIONS: wanted,
        }
        context.run(values, len(ids), graph=graph)

    def _step(self, tokens: Ids) -> Logits:
        one = self._one[: len(tokens)]
        self._enqueue(self._decode, tokens[:, None], self.lengths, one, self._first, self._cuda_graphs)
        return self._chosen(self._decode)

    def _chosen(self, context: Context) -> Logits:
        """``[B, V]`` of a step; -inf behind the ``top`` largest where the device may choose and the k-th is clear."""
        if self._device_sampling and 0 < self.top < self.bindings.vocab:
            found = context.largest(self.top + 1)
            if found is not None:
                values, columns = found
                clear = ~(values[:, -2] <= values[:, -1])  # NaN: it is the first value then, and has to be seen
                if clear.all():
                    return self._scattered(values[:, :-1], columns[:, :-1])
        return context.logits()[:, 0]

    def _scattered(self, values: Logits, columns: Ids) -> Logits:
        """``[B, V]`` with ``values`` at ``columns`` and -inf elsewhere, in a buffer that is cleared by what was written."""
        shape = (len(values), self.bindings.vocab)
        if self._sparse.shape != shape:
            self._sparse = np.full(shape, -np.inf, np.float32)
        else:
            np.put_along_axis(self._sparse, self._written, -np.inf, axis=1)
        np.put_along_axis(self._sparse, columns, values, axis=1)
        self._written = columns
        return self._sparse

    def close(self) -> None:
        for context in {id(c): c for c in (self._prefill, self._decode)}.values():
            context.close()
        for buffer in self._caches.values():
            self.device.free(buffer)
        self._caches, self._room = {}, 0
        self.device.close()

    # ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _move(self, batch: int, sources: dict[int, int]) -> None:
        """New buffers for ``batch`` rows (at least), row i a copy of the old row ``sources[i]``."""
        room = max(batch, self._room)
        fresh = {}
        for cache in self.graph.caches:
            row = self.bindings.row_bytes(cache.past)
            buffer = self.device.allocate(room * row)
            old = self._caches.get(cache.past)
            for target, source in sources.items():
                assert old is not None, "rows come from somewhere"
                self.device.copy(buffer.address + target * row, old.address + source * row, row)
            if old is not None:
                self.device.synchronize()
                self.device.free(old)
            fresh[cache.past] = buffer
        self._caches, self._room = fresh, room
        addresses = {}
        for cache in self.graph.caches:  # past and present at one address
            addresses[cache.past] = addresses[cache.present] = self._caches[cache.past].address
        self._prefill.bind_caches(addresses)
        if self._decode is not self._prefill:
            self._decode.bind_caches(addresses)
