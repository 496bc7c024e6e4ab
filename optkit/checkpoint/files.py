"""Finding a checkpoint on disk and naming it by its content. No weights are read here and nothing heavy is imported.

A model is given as a HF directory, a GGUF file, or a hub id. The hub's own cache answers for an id, and with
``HF_HUB_OFFLINE=1`` nothing else does. What optkit makes of a GGUF file is kept in a cache directory: ``OPTKIT_CACHE``, or
``optkit`` below ``XDG_CACHE_HOME`` (``~/.cache``).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optkit import manifest
from optkit.errors import CheckpointError, DependencyError

CONFIG = "config.json"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
SUPPORT = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.tiktoken",
    "chat_template*",
)
_DOWNLOADED = (CONFIG, *WEIGHTS, *SUPPORT)


def cache_directory() -> Path:
    """Where converted checkpoints and digests are kept; not created here."""
    if own := os.environ.get("OPTKIT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optkit"


def locate(model: str | Path) -> Path:
    """The directory or GGUF file that ``model`` means.

    Raises:
        CheckpointError: no such directory, file or hub id (in the local cache, when offline).
    """
    text = str(model)
    path = Path(text).expanduser()
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return path
        raise CheckpointError(f"{text}: a file that is not GGUF; give the model's directory, a .gguf file or a hub id")
    if path.is_dir():
        return path
    if path.is_absolute() or text.startswith((".", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text):
        raise CheckpointError(f"{text}: no such directory or file")
    return _snapshot(text)


def _snapshot(hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise DependencyError(
            f"{hub_id}: no such directory, and a hub id needs huggingface_hub: pip install optkit[quantize]"
        ) from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_DOWNLOADED)))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        where = (
            "offline (HF_HUB_OFFLINE=1) and not in the local hub cache"
            if _offline()
            else "not in the local hub cache, and the hub did not answer"
        )
        raise CheckpointError(f"{hub_id}: no such directory, and as a hub id it is {where}") from error
    except Exception as error:  # the hub client has many error types of its own and of its HTTP library
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{hub_id}: no such directory, and the hub did not give it: {reason}") from error


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: missing, unreadable or not a JSON object; names the file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: a JSON object is expected")
    return data


def support_files(directory: Path) -> list[Path]:
    """Tokenizer, chat template and generation settings of a checkpoint; its config and weights are not among them."""
    found = {path for pattern in SUPPORT for path in directory.glob(pattern) if path.is_file()}
    return sorted(found | {path for path in directory.glob("chat_templates/*") if path.is_file()})


def copy_support_files(source: Path, dest: Path) -> None:
    for path in support_files(source):
        target = dest / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def content_digest(directory: Path) -> str:
    """SHA-256 over the names and contents of config, weights, tokenizer and generation settings."""
    weights = {path for pattern in WEIGHTS for path in directory.glob(pattern)}
    paths = sorted({directory / CONFIG, *weights, *support_files(directory)})
    with _digest_cache() as known:
        return manifest.json_digest({p.relative_to(directory).as_posix(): _file_digest(p, known) for p in paths if p.is_file()})


def cached_file_digest(path: Path) -> str:
    """SHA-256 of one file; read again only if its size, inode or modification time changed."""
    with _digest_cache() as known:
        return _file_digest(path, known)


def _file_digest(path: Path, known: dict[str, str]) -> str:
    path = path.resolve()
    stat = path.stat()
    key = f"{path}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
    if key not in known:
        known[key] = manifest.file_digest(path)
    return known[key]


_known: dict[str, str] = {}


@contextlib.contextmanager
def _digest_cache() -> Any:
    """The digests remembered on disk, written back when something was added. A cache that cannot be used is not an error."""
    file = cache_directory() / "digests.json"
    with contextlib.suppress(OSError, ValueError):
        stored = json.loads(file.read_text(encoding="utf-8"))
        _known.update({k: v for k, v in stored.items() if isinstance(v, str)} if isinstance(stored, dict) else {})
    before = len(_known)
    yield _known
    if len(_known) > before:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f".{file.name}.{os.getpid()}")
            part.write_text(json.dumps(_known), encoding="utf-8")
            part.replace(file)


def portable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` in the spelling of transformers 5 *and* 4.

    transformers 4 reads ``rope_theta``, ``rope_scaling``, ``partial_rotary_factor`` and ``torch_dtype``, and silently takes
    defaults when it finds only 5's ``rope_parameters`` and ``dtype``. 5 reads both.
    """
    out = dict(config)
    for key, value in config.items():
        if key.endswith("_config") and key != "quantization_config" and isinstance(value, Mapping):
            out[key] = portable_config(value)
    if out.get("dtype") is not None:
        out.setdefault("torch_dtype", out["dtype"])
    rope = out.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return out
    if isinstance(rope.get("sliding_attention"), Mapping):  # one set per kind of layer
        if "rope_theta" in rope["sliding_attention"]:
            out.setdefault("rope_local_base_freq", rope["sliding_attention"]["rope_theta"])
        rope = rope.get("full_attention") or {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            out.setdefault(key, rope[key])
    if rope.get("rope_type", "default") != "default":
        rest = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
        out.setdefault("rope_scaling", rest)
    return out
