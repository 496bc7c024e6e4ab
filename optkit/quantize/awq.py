"""AWQ: scale up the weight columns that see large activations before rounding (Lin et al. 2023, arXiv:2306.00978).

Multiplying column ``i`` of ``W`` by ``s_i`` and dividing input ``i`` by it changes nothing before rounding. After, the error
that column contributes shrinks by about ``s_i``, unless it stretches the range of its group. The paper searches ``s = m^α``
(``m`` the mean magnitude of the inputs) over ``α`` by running the block for each candidate. Here a candidate is scored without
running anything: the error on the calibration inputs is ``tr(E H Eᵀ)`` with ``E = Q(W s)/s - W``, and ``H`` is known.

All linears that read the same input share ``s``, and it must fold into what makes that input (linear_groups.py); where one row
of a value projection feeds several channels (grouped queries), ``s`` is equal on those. Rounding uses the plain range, because
the scale search that comes later improves every candidate about alike. For large matrices a seeded sample of rows is scored.

Cost: ``O(rows I²)`` per candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optkit.checkpoint.affine import dequantize, quantize, range_scale
from optkit.quantize.rounding import row_errors
from optkit.quantize.statistics import Statistics
from optkit.scheme import QuantScheme

ALPHAS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85)
SCORED_ROWS = 768
RANGE = 1e3  # largest ratio of a scale to the middle one


@dataclass(frozen=True)
class Smoothing:
    """The outcome for a group.

    Attributes:
        scale: ``[I]``; columns of the weights are multiplied by it.
        alpha: the exponent that won; 0 leaves the group as it is.
        gain: error with the scale over error without, on the rows scored.
    """

    scale: Tensor
    alpha: float
    gain: float


def smooth_group(
    reduce: Callable[[Tensor], Tensor],
    weights: Sequence[Tensor],
    statistics: Statistics,
    scheme: QuantScheme,
    alphas: Sequence[float] = ALPHAS,
) -> Smoothing:
    """The scale for linears that share an input.

    Args:
        reduce: makes a wanted scale ``[I]`` one that folds (``producer.reduce``).
        weights: the linears' ``[O, I]`` matrices.
        statistics: of their common input.
        scheme: how they will be rounded.
        alphas: exponents to try, besides 0.
    """
    weight = sample_rows(torch.cat([w.float() for w in weights]), SCORED_ROWS)
    hessian = statistics.hessian
    base = _error(weight, hessian, torch.ones(weight.shape[1]), scheme)
    best = Smoothing(torch.ones(weight.shape[1]), 0.0, 1.0)
    if base == 0:
        return best
    magnitude = statistics.magnitude
    for alpha in alphas:
        s = reduce(power_scale(magnitude, alpha))
        gain = _error(weight, hessian, s, scheme) / base
        if gain < best.gain:
            best = Smoothing(s, alpha, gain)
    return best


def power_scale(magnitude: Tensor, alpha: float) -> Tensor:
    """``m^α`` normalised to have its largest and smallest value equally far from 1."""
    floor = magnitude.max().clamp(min=1e-30) * 1e-6
    s = magnitude.clamp(min=float(floor)) ** alpha
    return (s / (s.max() * s.min()).sqrt()).clamp(1 / RANGE, RANGE)


def _error(weight: Tensor, hessian: Tensor, s: Tensor, scheme: QuantScheme) -> float:
    scaled = weight * s
    error = dequantize(quantize(scaled, *range_scale(scaled, scheme), scheme)) / s - weight
    return float(row_errors(error, hessian).sum())


def sample_rows(weight: Tensor, rows: int) -> Tensor:
    """At most ``rows`` rows of ``weight [O, I]``, the same ones every time."""
    if len(weight) <= rows:
        return weight
    generator = torch.Generator().manual_seed(0)
    return weight[torch.randperm(len(weight), generator=generator)[:rows].sort().values]
