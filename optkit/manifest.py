"""``optkit.json``: what a directory is, what it was made from, and the facts later stages need.

A stage writes into a temporary sibling (:func:`staged_directory`) and renames it when everything, the manifest last, is
there. So a directory with a manifest is a complete directory, and a killed run leaves only ``.<name>.tmp-*`` behind, which
the next run into the same place removes. Digests are SHA-256 over content, never over paths or dates.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import optkit
from optkit.errors import ArtifactError, StorageError, UsageError, storage_errors

FILE_NAME = "optkit.json"
FORMAT_VERSION = 1
KINDS = ("quantized-checkpoint", "artifact", "build")


@dataclass(frozen=True)
class ModelSpec:
    """What later stages need to know of the model; read from the checkpoint, never guessed from a name.

    Attributes:
        model_type: the checkpoint's own label, for people; no code decides by it.
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        vocab_size: rows of the logits.
        num_heads, num_kv_heads, head_dim: of the attention layers (0 if there are none).
        max_seq_len: positions the checkpoint was trained for.
        bos_token_id, pad_token_id: or ``None``.
        eos_token_ids: union of config, generation_config and tokenizer.
        sliding_window: in tokens, or ``None``.
        tied_embeddings: lm_head and embedding are one tensor.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sliding_window: int | None = None
    tied_embeddings: bool = False

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelSpec:
        return cls(**{**data, "eos_token_ids": tuple(data.get("eos_token_ids", ()))})


@dataclass(frozen=True)
class Manifest:
    """The content of ``optkit.json``.

    Attributes:
        kind: ``quantized-checkpoint``, ``artifact`` or ``build``.
        source: digest of what it was made from (and its spec as the user wrote it, for people).
        recipe: the resolved recipe of the stage.
        versions: library -> version, of every library that shaped the result.
        model: the model's facts; ``None`` for a build.
        facts: what later stages need; for an artifact ``target``, ``graph`` (a GraphSpec), ``files``.
        files: relative path -> {"bytes", "sha256"}; every file of the directory except the manifest.
    """

    kind: str
    source: Mapping[str, Any]
    recipe: Mapping[str, Any]
    versions: Mapping[str, str]
    model: ModelSpec | None
    facts: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    optkit_version: str = optkit.__version__
    format_version: int = FORMAT_VERSION


def library_versions(*names: str) -> dict[str, str]:
    """Installed versions of the distributions ``names``; those that are not installed are left out."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def file_digest(path: str | Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def tree_digest(paths: Iterable[Path], root: Path) -> str:
    """SHA-256 over relative names and contents, in name order."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(root).as_posix()}\0{file_digest(path)}\n".encode())
    return digest.hexdigest()


def json_digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


def directory_files(directory: Path) -> dict[str, dict[str, Any]]:
    """Every file below ``directory`` except the manifest, with size and digest."""
    return {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.relative_to(directory).as_posix() != FILE_NAME
    }


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes ``optkit.json`` with the digests of the directory's files. The last act of a stage."""
    data = asdict(manifest)
    data["files"] = directory_files(directory)
    (directory / FILE_NAME).write_text(json.dumps(data, indent=1, default=list) + "\n", encoding="utf-8")


def read_manifest(directory: str | Path, kind: str | None = None) -> Manifest:
    """Reads a directory's manifest.

    Raises:
        ArtifactError: no such directory, no manifest (half-written or not optkit's), damaged, a newer format, another kind.
    """
    directory = Path(directory)
    path = directory / FILE_NAME
    if not directory.is_dir():
        raise ArtifactError(f"{directory}: no such directory")
    if not path.is_file():
        raise ArtifactError(f"{directory}: no {FILE_NAME} here, so it is not a complete optkit directory; make it again")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data["format_version"]
        if version > FORMAT_VERSION:
            raise ArtifactError(f"{path}: format {version} is newer than this optkit ({optkit.__version__}); upgrade optkit")
        model = None if data["model"] is None else ModelSpec.from_dict(data["model"])
        manifest = Manifest(**{**data, "model": model})
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: damaged ({type(error).__name__}: {error}); make the directory again") from error
    if kind is not None and manifest.kind != kind:
        raise ArtifactError(f"{directory}: holds a {manifest.kind}, and what is needed here is: {kind}")
    return manifest


def check_files(directory: Path, manifest: Manifest, digests: bool = False) -> None:
    """Raises ArtifactError if a listed file is missing or has another size (or digest, when ``digests``)."""
    for name, entry in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise ArtifactError(f"{path}: missing, though {FILE_NAME} lists it; copy the whole directory or make it again")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise ArtifactError(
                f"{path}: {size} bytes, and {FILE_NAME} says {entry['bytes']}: truncated or replaced; make it again"
            )
        if digests and file_digest(path) != entry["sha256"]:
            raise ArtifactError(f"{path}: its content is not what {FILE_NAME} recorded; make it again")


@contextlib.contextmanager
def staged_directory(out_dir: str | Path) -> Iterator[Path]:
    """A temporary sibling of ``out_dir`` that takes its place when the block ends without an error.

    An existing ``out_dir`` is replaced if it holds a manifest or is empty; anything else in the way is refused, so that a
    mistyped path never deletes somebody's files. On an error nothing is left behind.

    Raises:
        UsageError: something that is not optkit's is in the way.
        StorageError: disk full, or the place is not writable.
    """
    out = Path(out_dir)
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: is a file; the output is a directory")
    if out.is_dir() and any(out.iterdir()) and not (out / FILE_NAME).is_file():
        raise UsageError(f"{out}: is not empty and not an optkit directory; choose another output or remove it yourself")
    with storage_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{out.name}.tmp-"
        for stale in out.parent.glob(prefix + "*"):
            pid = stale.name[len(prefix) :].partition("-")[0]
            if not (pid.isdigit() and os.path.exists(f"/proc/{pid}")):
                shutil.rmtree(stale, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=out.parent))
    os.chmod(staging, 0o755)
    try:
        with storage_errors(out):
            yield staging
            if not (staging / FILE_NAME).is_file():
                raise StorageError(f"{out}: the stage ended without writing {FILE_NAME}")
            _readable(staging)
            replace_directory(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _readable(directory: Path) -> None:
    """Gives files and folders the permissions new ones have here; some libraries write files only their owner can read."""
    umask = os.umask(0)
    os.umask(umask)
    for path in directory.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def replace_directory(new: Path, old: Path) -> None:
    """Renames ``new`` to ``old``; an existing ``old`` is set aside first and deleted after."""
    aside = None
    if old.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{old.name}.tmp-{os.getpid()}-", dir=old.parent)) / "old"
        old.rename(aside)
    try:
        new.rename(old)
    except OSError:
        if aside is not None:
            aside.rename(old)
        raise
    if aside is not None:
        shutil.rmtree(aside.parent, ignore_errors=True)
