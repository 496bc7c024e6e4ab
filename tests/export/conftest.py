"""Artifacts of tiny models, each exported once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import optkit
from tests import tiny


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory) -> Callable[[str], Path]:
    """``checkpoint_of(name)``: the tiny model ``name`` as a HF directory."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("checkpoints") / name
            tiny.save(name, made[name])
        return made[name]

    return make


@pytest.fixture(scope="session")
def artifact_of(checkpoint_of, tmp_path_factory) -> Callable[..., Path]:
    """``artifact_of(name, scheme=None, **export options)``: the exported artifact, quantized first when a scheme is given."""
    made: dict[tuple, Path] = {}

    def make(name: str, scheme: str | None = None, quantize: tuple = (), **options: object) -> Path:
        key = (name, scheme, quantize, tuple(sorted(options.items())))
        if key not in made:
            source = checkpoint_of(name)
            root = tmp_path_factory.mktemp("artifacts")
            if scheme is not None:
                source = optkit.quantize(source, {"scheme": scheme, **dict(quantize)}, root / "quantized")
            made[key] = optkit.export(source, None, root / "artifact", **options)
        return made[key]

    return make
