"""``open_session(path)``: finds the backend by name, imports it, and opens the model; every backend is a :class:`Session`.

Nothing here imports an engine: a deployment installs the one it uses.
"""

from __future__ import annotations

import importlib
from dataclasses import fields
from pathlib import Path
from typing import Any

from optkit import manifest
from optkit.errors import ArtifactError, DependencyError, UnsupportedError, UsageError, nearest
from optkit.runtime.base import Session
from optkit.runtime.limits import SessionLimits

__all__ = ["BACKENDS", "Session", "SessionLimits", "open_session"]

# backend -> module, pip extra that installs its engine
BACKENDS = {
    "ort": ("optkit.runtime.backends.ort", "cpu"),
    "trt": ("optkit.runtime.backends.trt", "gpu"),
    "torch": ("optkit.runtime.backends.torch_ref", "quantize"),
}
BACKEND_OF_TARGET = {"ort": "ort", "onnx": "ort", "tensorrt": "trt", "gguf": "torch"}


def open_session(path: str | Path, backend: str | None = None, threads: int | None = None, **options: Any) -> Session:
    """Opens an artifact or a checkpoint for running.

    Args:
        path: an artifact directory (run by the engine it was exported for), or a checkpoint: HF directory, hub id or GGUF
            file (run in torch, the reference).
        backend: ``ort``, ``trt`` or ``torch``, to insist on one.
        threads: CPU threads; ``None`` is every CPU this process may use.
        options: limits (:class:`SessionLimits`) and the backend's own options (``dtype`` for torch, ``device`` for ort, …).

    Raises:
        ArtifactError, CheckpointError: nothing there, incomplete or damaged.
        DependencyError: the backend's library is not installed; says what to install.
        UsageError: no such backend or option.
    """
    directory = Path(path)
    if backend is None:
        backend = backend_for(directory)
    if backend not in BACKENDS:
        raise UsageError(f"backend {backend!r}: there is {', '.join(BACKENDS)}{nearest(backend, tuple(BACKENDS))}")
    if threads is not None and threads < 1:
        raise UsageError(f"threads {threads}: must be at least 1")
    names = {field.name for field in fields(SessionLimits)}
    limits = SessionLimits(**{name: options.pop(name) for name in list(options) if name in names})
    module_name, extra = BACKENDS[backend]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name == module_name:
            raise UnsupportedError(f"backend {backend!r}: this version of optkit does not have it") from error
        raise DependencyError(
            f"{path}: backend {backend!r} needs {error.name}, which is not installed: pip install 'optkit[{extra}]'"
        ) from error
    unknown = [name for name in options if name not in module.OPTIONS]
    if unknown:
        known = (*module.OPTIONS, *sorted(names))
        raise UsageError(f"open_session has no option {unknown[0]!r} for backend {backend!r}{nearest(unknown[0], known)}")
    session: Session = module.open_backend(path, threads=threads, limits=limits, **options)
    return session


def backend_for(path: Path) -> str:
    """By what the directory is: its manifest decides, and without one it is a checkpoint, or somebody else's ONNX model."""
    if (path / manifest.FILE_NAME).is_file():
        read = manifest.read_manifest(path)
        if read.kind != "artifact":
            return "torch"
        target = str(read.facts.get("target"))
        if target not in BACKEND_OF_TARGET:
            raise ArtifactError(f"{path}: made for target {target!r}, which this optkit does not run; upgrade optkit")
        return BACKEND_OF_TARGET[target]
    return "ort" if (path / "model.onnx").is_file() else "torch"
