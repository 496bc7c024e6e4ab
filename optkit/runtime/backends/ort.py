"""ONNX Runtime, for the targets ``ort`` and ``onnx`` and for other exporters' models with a growing cache.

**One session, weights once.** Prefill and decode are the same graph; the weights' external file is memory-mapped by the engine.

**The cache stays where it is.** In the in-place layouts each cache tensor is one buffer ``[B, …, capacity, …]`` that is
bound as past *and* as present, at the same address in every run. A smaller batch is the first rows of the buffer, a single
row is a window into it: both are only other shapes and addresses for the same memory, so rows leave a batch, and a row is
read or extended alone, without copying. Fixed-size recurrent states have two buffers that swap roles.

**A decode step binds nothing.** ``input_ids [B, 1]``, an ``attention_mask`` as long as the capacity (ones first; measured as
fast as an exact one) and ``logits [B, 1, V]`` are bound once; a step writes the tokens and one 1 per row, runs, and reads the
logits.

What one run of a layout can do, and how the rest is made of it:

=========  ============================================  ==================================================
layout     one run                                       otherwise
=========  ============================================  ==================================================
slots      a first prompt of any rows; one token per     row by row
           row; more tokens for one row
chunks     0..S tokens for every row                     rows with many tokens alone, where padding would cost more
growing    the same number of tokens for every row       a ragged first prompt is padded on the left
=========  ============================================  ==================================================
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from optkit import manifest
from optkit.errors import ArtifactError, EngineError, UnsupportedError
from optkit.io_spec import EXACT_INT8, GraphSpec
from optkit.manifest import ModelSpec
from optkit.runtime.backends._foreign import foreign_graph, foreign_model
from optkit.runtime.backends._growing import GrowingCache
from optkit.runtime.backends._inplace import InPlaceCache
from optkit.runtime.backends._providers import CPU, check_loaded, first_of, providers_for, with_options
from optkit.runtime.base import Ids, Logits, Session
from optkit.runtime.limits import SessionLimits

OPTIONS = ("device", "chunks", "spin", "profile", "provider_options")


def open_backend(
    path: str | Path,
    threads: int | None = None,
    limits: SessionLimits | None = None,
    device: str | None = None,
    chunks: bool = False,
    spin: bool = True,
    profile: str | None = None,
    provider_options: Mapping[str, Any] | None = None,
) -> OrtSession:
    """Opens an artifact, or a directory with ``model.onnx`` and ``config.json`` made by another exporter.

    Args:
        path: the directory.
        threads: CPU threads; ``None`` is every CPU this process may use.
        limits: see :class:`SessionLimits`.
        device: ``cpu``, ``cuda``, ``tensorrt`` or ``tensorrt-rtx`` (the last two for target ``onnx``); ``None`` takes CUDA
            where the installed ONNX Runtime can load it, else the CPU.
        chunks: run the graph that takes another number of tokens from each row (exported with ``chunks: true``); for batches
            whose rows come and go (:mod:`optkit.runtime.scheduler`).
        spin: let idle threads spin between operators; ``False`` leaves the CPU to others at the price of latency.
        profile: write the engine's profile to files with this prefix.
        provider_options: of the device's execution provider, by ONNX Runtime's names (``{"trt_fp16_enable": True}``).

    Raises:
        ArtifactError: incomplete or damaged, or ONNX Runtime cannot load it.
        EngineError: the device's provider did not load.
        UnsupportedError, UsageError: no such device here, or not for this graph.
    """
    directory = Path(path)
    model_file, graph, spec, target = _described(directory, chunks)
    providers = with_options(providers_for(device, target), provider_options)
    engine = _load(directory / model_file, providers, threads, spin, profile, graph is not None and graph.int8_activations)
    if device is not None:
        check_loaded(engine, first_of(providers), str(directory))
    if graph is None:
        graph = foreign_graph([(i.name, i.shape, i.type) for i in engine.get_inputs()], spec)
    return OrtSession(engine, graph, spec, directory, limits or SessionLimits())


class OrtSession(Session):
    """A graph that ONNX Runtime runs, behind the session contract.

    Args:
        engine: the loaded graph.
        graph: its contract.
        spec: the model's facts.
        directory: where the tokenizer is.
        limits: as given by the user.
    """

    backend = "ort"

    def __init__(
        self, engine: onnxruntime.InferenceSession, graph: GraphSpec, spec: ModelSpec, directory: Path, limits: SessionLimits
    ) -> None:
        super().__init__(spec, directory, graph.max_seq_len, limits)
        self.graph = graph
        self.recurrent = graph.recurrent
        self.rope_switch = graph.rope_switch
        self.engine = engine
        self.device = "cuda" if engine.get_providers()[0] != CPU else "cpu"
        kind = GrowingCache if graph.layout == "growing" else InPlaceCache
        self.cache: InPlaceCache | GrowingCache = kind(_Engine(engine, self.device, directory), graph, spec.vocab_size)

    def cache_bytes(self, batch: int, length: int) -> int:
        return self.graph.cache_bytes(batch, length)

    @property
    def kv_bytes(self) -> int:
        return self.cache.nbytes

    def close(self) -> None:
        self.cache.free()
        del self.engine

    def _allocate(self, batch: int, capacity: int) -> None:
        self.capacity = self.cache.allocate(batch, capacity)

    def _resize(self, capacity: int) -> None:
        self.cache.resize(capacity, self.lengths)

    def _extend(self, ids: Ids, counts: Ids, every: bool) -> Logits:
        return self.cache.extend(ids, self.lengths, counts, every)

    def _step(self, tokens: Ids) -> Logits:
        return self.cache.step(tokens, self._rows)

    def _truncate(self, lengths: Ids) -> None:
        self.cache.truncate(lengths, self.lengths)

    def _select(self, rows: Ids) -> None:
        self.cache.select(rows, self.lengths)


class _Engine:
    """The four things the caches need of ONNX Runtime; every failure becomes an :class:`EngineError`."""

    def __init__(self, engine: onnxruntime.InferenceSession, device: str, directory: Path) -> None:
        self._engine = engine
        self.device = device
        self._directory = directory
        self.inputs = {i.name: i.type for i in engine.get_inputs()}
        # an initializer that may be overridden is not among the inputs
        self.inputs |= {i.name: i.type for i in engine.get_overridable_initializers()}

    def binding(self) -> Any:
        return self._engine.io_binding()

    def run(self, binding: Any) -> None:
        try:
            self._engine.run_with_iobinding(binding)
        except Exception as error:  # the library's exceptions share no base class
            reason = " ".join(str(error).split())
            raise EngineError(f"{self._directory}: ONNX Runtime failed: {reason[:400]}") from error

    def device_buffer(self, array: np.ndarray) -> Any:
        """A copy of ``array`` on the device."""
        return onnxruntime.OrtValue.ortvalue_from_numpy(array, self.device, 0)


def _described(directory: Path, chunks: bool) -> tuple[str, GraphSpec | None, ModelSpec, str]:
    """Model file, graph contract (``None`` for another exporter's model), model facts and target of a directory."""
    if not (directory / manifest.FILE_NAME).is_file():
        if not (directory / "model.onnx").is_file():
            raise ArtifactError(f"{directory}: no {manifest.FILE_NAME} and no model.onnx here; export the model first")
        return "model.onnx", None, foreign_model(directory), "of another exporter"
    read = manifest.read_manifest(directory, kind="artifact")
    manifest.check_files(directory, read)
    if chunks and "chunks_file" not in read.facts:
        raise UnsupportedError(f"{directory}: has no graph for chunks; export it again with chunks: true")
    try:
        graph = GraphSpec.from_dict(read.facts["chunks_graph" if chunks else "graph"])
        model_file = str(read.facts["chunks_file" if chunks else "model_file"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{directory}: {manifest.FILE_NAME} does not describe an ONNX graph ({error}); export it again"
        ) from error
    if graph.layout == "scatter":
        raise UnsupportedError(
            f"{directory}: its static cache is for TensorRT; for ONNX Runtime export with target ort or onnx"
        )
    if read.model is None:
        raise ArtifactError(f"{directory}: {manifest.FILE_NAME} says nothing of the model; export it again")
    return model_file, graph, read.model, str(read.facts.get("target"))


def _load(
    path: Path, providers: list[Any], threads: int | None, spin: bool, profile: str | None, exact_int8: bool = False
) -> onnxruntime.InferenceSession:
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads or available_cpus()
    settings.inter_op_num_threads = 1
    settings.log_severity_level = 3
    settings.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    if exact_int8:
        settings.add_session_config_entry(*EXACT_INT8)
    if not spin:
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if profile:
        settings.enable_profiling = True
        settings.profile_file_prefix = profile
    try:
        return onnxruntime.InferenceSession(str(path), settings, providers=providers)
    except Exception as error:  # the library's exceptions share no base class
        reason = " ".join(str(error).split())
        raise ArtifactError(f"{path}: ONNX Runtime {onnxruntime.__version__} cannot load it: {reason[:400]}") from error


def available_cpus() -> int:
    """CPUs this process may use: its affinity, and a container's quota where there is one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return count
