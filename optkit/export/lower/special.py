"""Functions that ONNX has no operator for, written with those it has; the same for every target.

``erfinv``: the inverse error function in float32 after M. Giles, "Approximating the erfinv function" (GPU Computing Gems, 2011,
single precision version): with ``w = -log((1 - x)(1 + x))``, ``x`` times a polynomial in ``w - 2.5`` for ``w < 5``, else in
``sqrt(w) - 3``. Relative error 1.3e-7 without rounding. Models use it on constants (a sparsity turned into a threshold), where
it is folded away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from optkit.export.lower import contrib
from optkit.export.lower.contrib import opset

_CENTRAL = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164, 0.246640727,
    1.50140941,
)  # fmt: skip
_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047, 1.00167406,
    2.83297682,
)  # fmt: skip


class SpecialTable:
    """The translations; one instance per export."""

    def __init__(self, version: int) -> None:
        self.op = opset(version)

    def table(self) -> dict[Any, Callable[..., Any]]:
        erfinv = contrib.translation(self.erfinv)
        return {torch.ops.aten.erfinv.default: erfinv, torch.ops.prims.erf_inv.default: erfinv}

    def number(self, value: float) -> Any:
        return self.op.Constant(value_float=value)

    def horner(self, coefficients: Sequence[float], x: Any) -> Any:
        total = self.number(coefficients[0])
        for coefficient in coefficients[1:]:
            total = self.op.Add(self.op.Mul(total, x), self.number(coefficient))
        return total

    def erfinv(self, x: Any) -> Any:
        op, one, limit = self.op, self.number(1.0), self.number(5.0)
        wide = op.Cast(x, to=1)
        w = op.Neg(op.Log(op.Mul(op.Sub(one, wide), op.Add(one, wide))))
        central = self.horner(_CENTRAL, op.Sub(w, self.number(2.5)))
        tail = self.horner(_TAIL, op.Sub(op.Sqrt(op.Max(w, limit)), self.number(3.0)))
        return op.CastLike(op.Mul(wide, op.Where(op.Less(w, limit), central, tail)), x)
