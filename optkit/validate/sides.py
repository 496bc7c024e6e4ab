"""What validation needs to know about the two sides, whatever engine runs them: opening, describing, tokenizing, all logits."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from optkit.errors import OptkitError
from optkit.manifest import FILE_NAME, read_manifest
from optkit.validate.cases import IntArray


@contextlib.contextmanager
def opened(side: str | Path | Any, backend: str | None = None, threads: int | None = None) -> Iterator[Any]:
    """A session for ``side``: a path is opened and closed again, an open session is used and left open."""
    if not isinstance(side, (str, Path)):
        yield side
        return
    from optkit.runtime.session import backend_for, open_session

    backend = backend or backend_for(Path(side))
    # Quantized weights are dequantized once and not at every step: the same numbers, many times faster.
    options = {"packed": False} if backend == "torch" else {}
    session = open_session(side, backend=backend, threads=threads, **options)
    try:
        yield session
    finally:
        session.close()


@contextlib.contextmanager
def in_float64(side: str | Path | Any, session: Any) -> Iterator[Any]:
    """The same reference computed in float64, or ``None`` where there is no such thing (another engine, or not a path)."""
    if not isinstance(side, (str, Path)) or getattr(session, "backend", None) != "torch":
        yield None
        return
    from optkit.runtime.session import open_session

    precise = open_session(side, backend="torch", dtype="float64", packed=False)
    try:
        yield precise
    finally:
        precise.close()


def vocab_size(session: Any) -> int:
    size: int = session.spec.vocab_size
    return size


def encoder(session: Any) -> Callable[[str], Sequence[int]] | None:
    """Text to ids without special tokens, or ``None`` if the session has no tokenizer."""
    if not getattr(session, "has_tokenizer", False):
        return None
    return lambda text: session.tokenizer.encode(text, add_special_tokens=False)


def all_logits(session: Any, ids: IntArray) -> npt.NDArray[Any]:
    """Logits ``[S, V]`` of every position of one row ``ids [S]``."""
    lengths = np.array([len(ids)], dtype=np.int64)
    session.reset()
    logits: npt.NDArray[Any] = session.prefill(ids[None, :], lengths, logits="all")[0]
    return logits


def describe(side: str | Path | Any, session: Any) -> dict[str, Any]:
    """Facts for the report: name, path, backend and, for an optkit directory, kind, scheme, dtype, size and digests."""
    facts: dict[str, Any] = {"name": str(side) if isinstance(side, (str, Path)) else type(session).__name__}
    facts["backend"] = str(getattr(session, "backend", type(session).__name__))
    if not isinstance(side, (str, Path)) or not (Path(side) / FILE_NAME).is_file():
        return facts
    with contextlib.suppress(OptkitError):
        manifest = read_manifest(side)
        total = sum(entry["bytes"] for entry in manifest.files.values())
        facts |= {
            "kind": manifest.kind,
            "target": manifest.facts.get("target"),
            "dtype": manifest.facts.get("dtype") or manifest.recipe.get("dtype"),
            "quantized": bool(schemes(manifest.facts)),
            "scheme": ", ".join(schemes(manifest.facts)) or "unquantized",
            "bytes": total,
            "size": f"{total / 1e6:.1f} MB",
            "source": dict(manifest.source),
        }
    return facts


def schemes(facts: Mapping[str, Any]) -> list[str]:
    """The schemes a manifest speaks of, the most used one first; none is an unquantized model."""
    found = facts.get("quantization") or Counter((facts.get("schemes") or {}).values())
    return sorted(found, key=lambda name: -found[name])
