"""Weights that are stored quantized: what a format must answer, and what the formats share.

One class per format (compressed.py, gptq_format.py, awq_format.py, gguf_source.py) reads its tensors to codes and scales,
packed to packed: no weight is dequantized and rounded again on the way. :class:`Dequantized` is the other view of the same
store, with floating-point weights in place of the codes, for stages that want those.

Groups are runs of consecutive inputs in optkit and in every kernel it exports to. A format whose groups are given input by
input (``g_idx`` of activation order) can be read where they still are runs, of some size a kernel takes
(:func:`uniform_groups`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.checkpoint.affine import QuantizedWeight, dequantize, row_parts
from optkit.checkpoint.store import TensorStore
from optkit.errors import UnsupportedError
from optkit.scheme import GROUP_SIZES, QuantScheme

CHUNK = 1 << 22  # elements dequantized at a time


class Packed:
    """The quantized matrices of a store.

    Attributes:
        schemes: stored module -> scheme.
        lead: of a module's tensors, the leaf names that stand for its weight.
        leaves: the leaf names of its other tensors; a bias is none of them.
    """

    lead: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()

    def __init__(self, store: TensorStore, schemes: Mapping[str, QuantScheme]) -> None:
        self.store, self.schemes = store, dict(schemes)

    def part_of(self, key: str) -> str | None:
        """The module whose quantized weight the stored tensor ``key`` is a part of."""
        module, _, leaf = key.rpartition(".")
        return module if module in self.schemes and leaf in (*self.lead, *self.leaves) else None

    def leads(self, key: str) -> bool:
        """Does the part ``key`` stand for the whole?"""
        return key.rpartition(".")[2] in self.lead

    def read(self, module: str) -> QuantizedWeight:
        """The codes and scales of a stored module."""
        raise NotImplementedError


class Dequantized(TensorStore):
    """A store with ``<module>.weight`` in floating point for everything its format holds quantized.

    A weight is dequantized when it is read, some rows at a time, and rounded once.
    """

    def __init__(self, packed: Packed, dtype: torch.dtype) -> None:
        super().__init__({})
        self._packed, self._store, self._dtype = packed, packed.store, dtype
        plain = [name for name in packed.store.names() if packed.part_of(name) is None]
        self._modules = {f"{module}.weight": module for module in packed.schemes}
        self._names = [*plain, *self._modules]
        self._shapes: dict[str, tuple[int, ...]] = {}

    def names(self) -> list[str]:
        return list(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._modules:
            return self._store.shape(name)
        if name not in self._shapes:
            self._shapes[name] = tuple(self._packed.read(self._modules[name]).codes.shape)
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype if name in self._modules else self._store.dtype(name)

    def nbytes(self, name: str) -> int:
        return self.dtype(name).itemsize * torch.Size(self.shape(name)).numel()

    def get(self, name: str) -> Tensor:
        module = self._modules.get(name)
        return self._store.get(name) if module is None else floating(self._packed.read(module), self._dtype)


def floating(quantized: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The dequantized matrix ``[O, I]``, computed in float32 a few rows at a time."""
    rows = max(1, CHUNK // quantized.codes.shape[1])
    out = torch.empty(quantized.codes.shape, dtype=dtype)
    for target, part in zip(out.split(rows), row_parts(quantized, rows), strict=True):
        target.copy_(dequantize(part))
    return out


def uniform_groups(index: Tensor, name: str) -> tuple[int | None, Tensor]:
    """The largest group size whose runs of consecutive inputs each have one scale, and which scale each run has.

    Args:
        index: ``[I]`` the scale of each input, as the format stores it.
        name: the tensor, for the message.

    Returns:
        The group size (``None``: one scale for a whole row) and int64 ``[G]``.

    Raises:
        UnsupportedError: neighbouring inputs have different scales (activation order).
    """
    index = index.to(torch.int64)
    if not bool((index != index[0]).any()):
        return None, index[:1]
    for size in reversed(GROUP_SIZES):
        if len(index) % size == 0:
            runs = index.unflatten(0, (-1, size))
            if bool((runs == runs[:, :1]).all()):
                return size, runs[:, 0].contiguous()
    raise UnsupportedError(
        f"{name}: neighbouring inputs belong to different groups (quantized in activation order, desc_act), and every kernel "
        "optkit exports to has one scale for a run of consecutive inputs; take a checkpoint made with desc_act false, or with "
        "static groups and its columns put back"
    )
