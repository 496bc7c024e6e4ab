"""Writing the weights of a quantized checkpoint, tensor by tensor (docs/quantized-checkpoint.md).

A linear is stored packed, under the name its floating-point weight had. What transformers cannot hold packed (an embedding, a
transposed linear, a second scheme beside an asymmetric one) is stored dequantized, in the smallest type that holds it exactly,
and its codes go into a folder beside the weights. Everything else is copied as it is stored; but tensors that transformers
converts while loading (experts one by one) are stored converted, for it takes such for quantized ones in a quantized
checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from optkit.checkpoint.affine import QuantizedWeight, dequantize, row_parts
from optkit.checkpoint.model import Checkpoint, is_transposed
from optkit.checkpoint.store import CODES_NAME, ShardWriter, pack_for_store
from optkit.quantize.plan import Plan
from optkit.quantize.rtn import CHUNK


class Writer:
    """Writes into ``directory``: first the quantized modules, then :meth:`rest`."""

    def __init__(self, source: Checkpoint, plan: Plan, directory: Path) -> None:
        self._source, self._plan, self._model = source, plan, source.sources.model
        self._main = ShardWriter(directory)
        self._codes: ShardWriter | None = None
        self._folder = directory / CODES_NAME
        self._packed = self._packable()

    def packs(self, module: str) -> bool:
        """Is a quantized ``module`` stored packed among the weights? Else it is dequantized there, with its codes beside."""
        return module in self._packed

    def _packable(self) -> set[str]:
        schemes = {name: s for name, s in self._plan.schemes.items() if isinstance(self._model.get_submodule(name), nn.Linear)}
        if all(scheme.symmetric for scheme in schemes.values()):
            return set(schemes)
        common = Counter(schemes.values()).most_common(1)[0][0]
        return {name for name, scheme in schemes.items() if scheme == common}

    def quantized(self, module: str, quantized: QuantizedWeight) -> None:
        """Writes one quantized module."""
        weight = f"{module}.weight"
        tensors = pack_for_store(quantized)
        if self.packs(module):
            for leaf, tensor in tensors.items():
                self._main.add(f"{self._stored_name(weight).removesuffix('.weight')}.{leaf}", tensor)
            return
        if self._codes is None:
            self._folder.mkdir()
            self._codes = ShardWriter(self._folder)
        for leaf, tensor in tensors.items():
            self._codes.add(f"{module}.{leaf}", tensor)
        dense = exact_values(quantized)
        transposed = is_transposed(self._model.get_submodule(module))
        self._main.add(self._stored_name(weight), dense.T if transposed else dense)

    def _stored_name(self, parameter: str) -> str:
        """The name ``parameter`` is stored under: as in the source, or its own if the source has it converted or tied."""
        key = self._source.sources.stored_key(parameter)
        own_copy = self._plan.tied == "untie" and parameter == f"{self._plan.lm_head}.weight"
        return parameter if key is None or own_copy else key

    def rest(self, changed: Callable[[str], Tensor | None]) -> None:
        """Writes what is not quantized, and closes the files.

        Args:
            changed: the new value of a parameter that the method edits, or ``None``.
        """
        for keys, names in self._source.sources.units():
            kept = [name for name in self._distinct(names) if not self._plan.covers(name)]
            edits = {name: changed(name) for name in kept}
            converts = self._source.sources.stored_key(names[0]) is None and bool(self._packed)
            if len(kept) == len(names) and not converts and all(edit is None for edit in edits.values()):
                for key in keys:
                    self._main.add(key, self._source.tensors.get(key))
                continue
            for name, edit in edits.items():
                self._main.add(self._stored_name(name), self._original(name, keys) if edit is None else edit)
        self._main.close()
        if self._codes is not None:
            self._codes.close()

    def _distinct(self, names: list[str]) -> Iterator[str]:
        """``names`` without the second name of a tensor that stays tied."""
        head = f"{self._plan.lm_head}.weight"
        tied = self._plan.ties and f"{self._plan.embedding}.weight" in names
        yield from (name for name in names if not (tied and name == head))

    def _original(self, parameter: str, keys: list[str]) -> Tensor:
        """The tensor of ``parameter`` in the type it is stored in."""
        store = self._source.tensors
        return (
            store.get(keys[0])
            if self._source.sources.stored_key(parameter)
            else self._source.tensor_for(parameter, store.dtype(keys[0]))()
        )


def exact_values(quantized: QuantizedWeight) -> Tensor:
    """The dequantized matrix in float16 if that holds every value exactly, else in float32."""
    rows = max(1, CHUNK // quantized.codes.shape[1])
    parts = [torch.equal(w.half().float(), w) for w in map(dequantize, row_parts(quantized, rows))]
    out = torch.empty(quantized.codes.shape, dtype=torch.float16 if all(parts) else torch.float32)
    for target, part in zip(out.split(rows), row_parts(quantized, rows), strict=True):
        target.copy_(dequantize(part))
    return out
