"""A number that a model believes to be one for the whole batch, and that is another one in every row.

Some attention modules ask the cache how many tokens it holds and compute positions from the answer: ``arange(S) + length``.
In a right-padded batch every row has a length of its own. :class:`PerRow` pretends to be the one number (or the tensor
computed from it) and keeps a leading batch axis in secret; when the model inserts its own batch axis of size 1
(``.view(1, S, 1, 1)``, ``.unsqueeze(0)``, ``[None]``) the secret axis takes that place and an ordinary tensor comes out.

Only elementwise arithmetic is supported; anything else raises ``TypeError``, which the exporter takes as "not this way".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "div",
    "true_divide",
    "floor_divide",
    "radd",
    "rmul",
    "rsub",
    "remainder",
    "fmod",
    "pow",
    "neg",
)
_FUNCTIONS = ("abs", "floor", "exp", "log", "log1p", "log2", "sqrt", "clamp", "maximum", "minimum", "float", "to", "type_as")
_ELEMENTWISE = frozenset(_ARITHMETIC + _FUNCTIONS)


class PerRow:
    """``data [B, *shape]``, which the model sees as ``[*shape]``."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def shape(self) -> torch.Size:
        return self.data.shape[1:]

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "").strip("_")
        if name not in _ELEMENTWISE:
            raise TypeError(f"{name} of a length that differs by row")
        rank = max(len(a.shape) for a in args if isinstance(a, (Tensor, PerRow)))
        return cls(function(*(_aligned(a, rank) for a in args), **(kwargs or {})))

    def _elementwise(self, name: str, *args: Any, **kwargs: Any) -> PerRow:
        return self.__torch_function__(getattr(Tensor, name), (), (self, *args), kwargs)

    def __add__(self, other: Any) -> PerRow:
        return self._elementwise("add", other)

    def __sub__(self, other: Any) -> PerRow:
        return self._elementwise("sub", other)

    def __mul__(self, other: Any) -> PerRow:
        return self._elementwise("mul", other)

    def __truediv__(self, other: Any) -> PerRow:
        return self._elementwise("div", other)

    def __floordiv__(self, other: Any) -> PerRow:
        return self._elementwise("floor_divide", other)

    def __rsub__(self, other: Any) -> PerRow:
        return -1 * self + other

    __radd__, __rmul__ = __add__, __mul__

    def float(self) -> PerRow:
        return self._elementwise("float")

    def to(self, *args: Any, **kwargs: Any) -> PerRow:
        return self._elementwise("to", *args, **kwargs)

    def view(self, *shape: Any) -> Tensor:
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if len(wanted) < 2 or wanted[0] != 1:
            raise TypeError("a length that differs by row is used without a batch axis")
        return self.data.reshape(self.data.shape[0], *wanted[1:])

    reshape = view

    def unsqueeze(self, dim: int) -> Tensor | PerRow:
        return self.data if dim == 0 else PerRow(self.data.unsqueeze(dim + 1 if dim > 0 else dim))

    def __getitem__(self, index: Any) -> Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        if parts[0] is not None:
            raise TypeError("a length that differs by row is indexed")
        return self.data[(slice(None), *parts[1:])]


def _aligned(value: Any, rank: int) -> Any:
    """``data`` with its pretended shape padded to ``rank`` axes from the left, behind the batch axis."""
    if not isinstance(value, PerRow):
        return value
    data = value.data
    return data.reshape(data.shape[0], *[1] * (rank + 1 - data.dim()), *data.shape[1:])
