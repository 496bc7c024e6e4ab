"""Finished blocks on disk, so that a killed run goes on where it stopped.

One directory for each block, written beside and renamed, in a work directory whose name is a digest of everything the result
depends on: weights, tokens, schemes, options, versions, thread count (sums differ in their last bits with it). Another model,
recipe or library never meets the files of this one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from optkit import manifest
from optkit.checkpoint.affine import QuantizedWeight
from optkit.checkpoint.files import cache_directory
from optkit.checkpoint.store import TensorStore, write_shards
from optkit.errors import storage_errors
from optkit.scheme import scheme_from_dict

FACTS = "facts.json"
LEAVES = ("codes", "scale", "zero", "input")


@dataclass
class BlockResult:
    """What a block became.

    Attributes:
        weights: linear (name inside the block) -> codes and scales.
        high: the same at more bits, for methods that choose between the two later.
        changed: parameter (name inside the block) -> new floating-point value.
        columns, rows: linear -> what smoothing multiplied its inputs ``[I]`` and outputs ``[O]`` by.
        facts: for the manifest.
    """

    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    high: dict[str, QuantizedWeight] = field(default_factory=dict)
    changed: dict[str, Tensor] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class Workspace:
    """A directory of finished blocks, named by what they depend on.

    Args:
        key: everything the results depend on.
        root: where work directories live.
    """

    def __init__(self, key: Mapping[str, Any], root: Path | None = None) -> None:
        self.directory = (root or cache_directory() / "quantize") / manifest.json_digest(key)[:32]
        with storage_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)

    def save(self, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Keeps ``tensors`` and ``facts``, complete or not at all."""
        final, partial = self.directory / name, self.directory / f"{name}.{os.getpid()}.tmp"
        with storage_errors(final):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            write_shards(partial, tensors.items())
            (partial / FACTS).write_text(json.dumps(facts), encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What was kept under ``name``, or ``None``."""
        path = self.directory / name
        if not path.is_dir():
            return None
        facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
        store = TensorStore.open(path) if any(path.glob("*.safetensors")) else None
        return {} if store is None else {key: store.get(key) for key in store.names()}, facts

    def save_block(self, index: int, result: BlockResult) -> None:
        tensors: dict[str, Tensor] = {}
        for kind in ("weights", "high"):
            for name, quantized in getattr(result, kind).items():
                parts = (quantized.codes, quantized.scale, quantized.zero_point, quantized.input_scale)
                tensors |= {f"{kind}/{name}/{leaf}": part for leaf, part in zip(LEAVES, parts, strict=True) if part is not None}
        for kind in ("changed", "columns", "rows"):
            tensors |= {f"{kind}/{name}": value for name, value in getattr(result, kind).items()}
        schemes = {name: [quantized.scheme.to_dict()] for name, quantized in result.weights.items()}
        for name, quantized in result.high.items():
            schemes[name].append(quantized.scheme.to_dict())
        self.save(f"block-{index}", tensors, {"facts": result.facts, "schemes": schemes})

    def load_block(self, index: int) -> BlockResult | None:
        """The result of a finished block, or ``None``."""
        found = self.load(f"block-{index}")
        if found is None:
            return None
        tensors, notes = found
        result = BlockResult(facts=notes["facts"])
        for name, schemes in notes["schemes"].items():
            for kind, scheme in zip(("weights", "high"), schemes, strict=False):
                codes, scale, zero, inputs = (tensors.pop(f"{kind}/{name}/{leaf}", None) for leaf in LEAVES)
                assert codes is not None
                assert scale is not None
                getattr(result, kind)[name] = QuantizedWeight(codes, scale, zero, scheme_from_dict(scheme), inputs)
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            getattr(result, kind)[name] = value
        return result

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
