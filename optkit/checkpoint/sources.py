"""Which stored tensors make which parameter of a model.

Most parameters are a stored tensor under the same or another name. Some are made of several (experts stored one by one and run
as one tensor), or are a part of one (a fused projection). The rules are transformers' (``Rules`` in model.py); this is the
table made of them, which reads a parameter when it is asked for and nothing else.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from optkit.checkpoint.modules import set_tensor
from optkit.checkpoint.packed import Packed
from optkit.checkpoint.store import TensorStore


class Placing(Protocol):
    """The rules of a model."""

    def place(self, key: str) -> tuple[str, Any, str] | None: ...

    def results(self, rule: Any, first: str) -> list[str]: ...

    def convert(self, rule: Any, first: str, tensors: Sequence[tuple[str, str, Callable[[], Tensor]]]) -> dict[str, Any]: ...

    def kept_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype: ...


class Sources:
    """The table of a model and a store.

    Attributes:
        model: the model on the meta device, as its config makes it.
        modules: module name -> name it is stored under, of the modules stored quantized.
        unused: stored tensors that nothing takes.
        tied: embedding and lm_head are one parameter.
    """

    def __init__(self, model: Any, store: TensorStore, rules: Placing, packed: Packed | None = None) -> None:
        self.model, self._store, self._rules, self._packed = model, store, rules, packed
        self._direct: dict[str, str] = {}  # name -> stored tensor
        self._converted: dict[str, tuple[Any, list[tuple[str, str]]]] = {}  # first name -> converter, its tensors and patterns
        self._part_of: dict[str, str] = {}  # name -> first name
        self.modules: dict[str, str] = {}
        self.unused: list[str] = []
        for key in sorted(store.names(), key=_natural):
            self._take(key)
        self._untied = self._tie()
        self.tied = self._embedding_tied()

    def _take(self, key: str) -> None:
        base = None if self._packed is None else self._packed.part_of(key)
        if base is not None and self._packed is not None and not self._packed.leads(key):
            return
        placed = self._rules.place(key if base is None else f"{base}.weight")
        if placed is None:
            self.unused.append(key)
            return
        name, rule, pattern = placed
        if base is not None:
            self.modules[name.removesuffix(".weight")] = base
        elif rule is None:
            self._direct[name] = key
        else:
            self._converted.setdefault(name, (rule, []))[1].append((key, pattern))
            self._part_of.update(dict.fromkeys(self._rules.results(rule, name), name))

    def _tie(self) -> list[str]:
        """Names of one tied parameter lead to the one that is stored. Returns those to untie: stored, with other values."""
        untied = []
        for target, source in self.model.all_tied_weights_keys.items():
            stored = [name for name in (target, source) if name in self]
            if len(stored) == 2 and not torch.equal(self.read(target), self.read(source)):
                untied.append(target)
            if len(stored) == 1:
                table = self._direct if stored[0] in self._direct else self._part_of
                table[target if stored[0] == source else source] = table[stored[0]]
        return untied

    def _embedding_tied(self) -> bool:
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if embedding is None or head is None or embedding.weight is not head.weight:
            return False
        names = [name for name, p in self.model.named_parameters(remove_duplicate=False) if p is head.weight]
        return not set(names) & set(self._untied)

    def untie(self, model: nn.Module) -> None:
        """Gives parameters that the config ties, and whose stored values differ, an object of their own."""
        for name in self._untied:
            set_tensor(model, name, nn.Parameter(model.get_parameter(name).data.clone(), requires_grad=False))

    def __contains__(self, name: object) -> bool:
        return name in self._direct or name in self._part_of

    def units(self) -> Iterator[tuple[list[str], list[str]]]:
        """``(stored tensors, the model's names made from them)``, one by one; a single stored tensor is taken as it is."""
        takers: dict[str, list[str]] = {}
        for name, key in self._direct.items():
            takers.setdefault(key, []).append(name)
        yield from (([key], names) for key, names in takers.items())
        for first, (_, keys) in self._converted.items():
            yield [key for key, _ in keys], [name for name, start in self._part_of.items() if start == first]

    def stored_key(self, name: str) -> str | None:
        """The stored tensor that is ``name`` as it is, or ``None`` if it takes a conversion."""
        return self._direct.get(name)

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tensor of ``name``, floating point as ``dtype`` (float32 where the model keeps that)."""
        dtype = self._rules.kept_dtype(name, dtype)
        if name in self._direct:
            return self._read(self._direct[name], dtype)
        first = self._part_of[name]
        rule, keys = self._converted[first]
        tensors = [(key, pattern, functools.partial(self._read, key, dtype)) for key, pattern in keys]
        value = self._rules.convert(rule, first, tensors)[name]
        return value[0] if isinstance(value, list) else value

    def _read(self, key: str, dtype: torch.dtype) -> Tensor:
        tensor = self._store.get(key)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _natural(key: str) -> list[Any]:
    """Orders ``layers.2`` before ``layers.10``: experts are stacked in this order."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", key)]
