"""The calibrated methods a recipe can name, as solvers of the driver in blocks.py, and what each does at each effort.

Efforts (measured in docs/quantization.md): ``fast`` does without token weights and refits, ``default`` finds weights on a
part of the text and refits once, ``high`` finds them on all of it and refits twice.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.checkpoint.affine import QuantizedWeight
from optkit.quantize import gptq, rtn
from optkit.quantize.awq import ALPHAS
from optkit.quantize.blocks import Calibrated, Options
from optkit.quantize.statistics import Statistics
from optkit.recipe import QuantizeRecipe
from optkit.scheme import QuantScheme

IMPORTANCE = {"fast": 0.0, "default": 0.25, "high": 1.0}
REFITS = {"fast": 0, "default": 1, "high": 2}


def split_rows(stacked: QuantizedWeight, sizes: list[int]) -> list[QuantizedWeight]:
    """Undoes the stacking of linears along ``O``."""
    zeros = [None] * len(sizes) if stacked.zero_point is None else stacked.zero_point.split(sizes)
    parts = zip(stacked.codes.split(sizes), stacked.scale.split(sizes), zeros, strict=True)
    return [QuantizedWeight(codes, scale, zero, stacked.scheme) for codes, scale, zero in parts]


class Gptq(Calibrated):
    """``method: gptq``."""

    @classmethod
    def choose(cls, recipe: QuantizeRecipe) -> Options:
        return Options((), IMPORTANCE[recipe.effort], refits=REFITS[recipe.effort])

    def solve(
        self, weights: Mapping[str, Tensor], schemes: Mapping[str, QuantScheme], statistics: Statistics
    ) -> dict[str, QuantizedWeight]:
        result: dict[str, QuantizedWeight] = {}
        for scheme in dict.fromkeys(schemes[name] for name in weights):
            names = [name for name in weights if schemes[name] == scheme]
            stacked = torch.cat([weights[name] for name in names])
            solved, rounded = self.quantize_stacked(stacked, scheme, statistics)
            sizes = [len(weights[name]) for name in names]
            result |= zip(names, split_rows(solved, sizes), strict=True)
            self.note_rounded(dict(zip(names, rounded.split(sizes), strict=True)))
        return result

    def quantize_stacked(self, weight: Tensor, scheme: QuantScheme, statistics: Statistics) -> tuple[QuantizedWeight, Tensor]:
        """``weight [O, I]`` quantized, and the weights that were rounded, each as it stood when its turn came."""
        return gptq.quantize_and_trace(weight, scheme, statistics, self.options.damping, self.options.refits)

    def note_rounded(self, weights: dict[str, Tensor]) -> None:
        """The second result of :meth:`quantize_stacked` by linear; for methods that go on from there."""


class AwqGptq(Gptq):
    """``method: awq+gptq``: smooth first, then GPTQ."""

    @classmethod
    def choose(cls, recipe: QuantizeRecipe) -> Options:
        return Options(ALPHAS, IMPORTANCE[recipe.effort], refits=REFITS[recipe.effort])


class Awq(AwqGptq):
    """``method: awq``: smooth, then round to nearest on a grid searched with ``diag(H)``."""

    def quantize_stacked(self, weight: Tensor, scheme: QuantScheme, statistics: Statistics) -> tuple[QuantizedWeight, Tensor]:
        return rtn.quantize_linear(weight, scheme, statistics.diagonal if statistics.tokens else None), weight
