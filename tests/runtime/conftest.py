"""Tiny checkpoints and their exports, made once per test process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint(name, **config changes)`` -> a HF directory."""
    made: dict[Any, Path] = {}

    def make(name: str, **changes: Any) -> Path:
        key = (name, *sorted(changes.items()))
        if key not in made:
            made[key] = tiny.save(name, tmp_path_factory.mktemp("checkpoint") / name, **changes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def artifact(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``artifact(name, **config changes)`` -> its unquantized export for ONNX Runtime, with the graph for chunks if asked."""
    from optkit.export.run import export

    made: dict[Any, Path] = {}

    def make(name: str, chunks: bool = False, dtype: str = "fp32", target: str = "ort", **changes: Any) -> Path:
        key = (name, chunks, dtype, target, *sorted(changes.items()))
        if key not in made:
            out = tmp_path_factory.mktemp("artifact") / name
            made[key] = export(checkpoint(name, **changes), out_dir=out, target=target, dtype=dtype, chunks=chunks)
        return made[key]

    return make
