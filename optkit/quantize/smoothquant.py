"""SmoothQuant: 8-bit activations, with their outliers moved into the weights (Xiao et al. 2022, arXiv:2211.10438).

A few input channels are much larger than the others, and an int8 scale that covers them leaves few steps for the rest. Input
channel ``j`` is divided by ``s_j = max|X_j|^α / max|W_j|^(1-α)`` and column ``j`` of the weights multiplied by it. The paper
fixes ``α = 0.5``; here each group of linears takes the ``α`` with the least output error on sampled inputs, both operands
rounded as they will be, and none if that is best.

Weights: one symmetric scale for each output channel. Activations: *dynamic*, a scale per token found at run time, or *static*,
one calibrated scale per linear. A static scale from the largest value seen wastes range on one token, so it is searched
between 0.1 and 1 times the peak for the least error on the sample, relative to each token's size (absolute errors would again
be ruled by the few largest tokens).

Cost: for each ``α`` a product of the sampled inputs (256) with at most :data:`~optkit.quantize.awq.SCORED_ROWS` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from optkit.checkpoint.affine import QuantizedWeight, dequantize, quantize, range_scale, safe_scale
from optkit.errors import InputError
from optkit.quantize.awq import RANGE, SCORED_ROWS, Smoothing, sample_rows
from optkit.quantize.blocks import Calibrated, Options
from optkit.quantize.linear_groups import Group
from optkit.quantize.rtn import quantize_linear as round_to_nearest
from optkit.quantize.statistics import Statistics
from optkit.recipe import QuantizeRecipe
from optkit.scheme import QuantScheme

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
INT8_MAX = 127


def fake_tokens(x: Tensor, scale: Tensor) -> Tensor:
    """``x [T, I]`` rounded to int8 with ``scale`` (``[T, 1]`` or a scalar)."""
    return (x / scale).round().clamp(-INT8_MAX - 1, INT8_MAX) * scale


def token_scale(x: Tensor) -> Tensor:
    """The scale of each token, ``[T, 1]``."""
    return (x.abs().amax(-1, keepdim=True) / INT8_MAX).clamp(min=1e-12)


def static_scale(statistics: Statistics) -> Tensor:
    """The one scale for all tokens with the least relative error of the sampled tokens; the peak when nothing is sampled."""
    peak = (statistics.peak.max() / INT8_MAX).clamp(min=1e-8)
    x = statistics.sample
    size = x.square().sum(-1).clamp(min=1e-30)
    errors = [float(((fake_tokens(x, peak * clip) - x).square().sum(-1) / size).sum()) for clip in CLIPS]
    return peak * CLIPS[min(range(len(CLIPS)), key=errors.__getitem__)]


def smooth_group(
    reduce: Callable[[Tensor], Tensor],
    weights: Sequence[Tensor],
    statistics: Statistics,
    scheme: QuantScheme,
    alphas: Sequence[float] = ALPHAS,
) -> Smoothing:
    """The scale for linears that share an input; see :func:`optkit.quantize.awq.smooth_group` for the arguments."""
    weight = torch.cat([w.float() for w in weights])
    column = weight.abs().amax(0)
    weight = sample_rows(weight, SCORED_ROWS)
    x = statistics.sample
    ones = torch.ones(weight.shape[1])
    base = _error(x, weight, ones, statistics, scheme)
    best = Smoothing(ones, 0.0, 1.0)
    if not base > 0:
        return best
    for alpha in alphas:
        s = reduce(migration_scale(statistics.peak, column, alpha))
        gain = _error(x, weight, s, statistics, scheme) / base
        if gain < best.gain:
            best = Smoothing(s, alpha, gain)
    return best


def migration_scale(peak: Tensor, column: Tensor, alpha: float) -> Tensor:
    """``max|X_j|^α / max|W_j|^(1-α)``, 1 where either is 0."""
    s = peak.clamp(min=1e-12) ** alpha / column.clamp(min=1e-12) ** (1 - alpha)
    s = torch.where((peak > 0) & (column > 0), s, torch.ones_like(s))
    return (s / s.log().mean().exp()).clamp(1 / RANGE, RANGE)


def _error(x: Tensor, weight: Tensor, s: Tensor, statistics: Statistics, scheme: QuantScheme) -> float:
    scaled, inputs = weight * s, x / s
    rounded = dequantize(quantize(scaled, *range_scale(scaled, scheme), scheme))
    scale = token_scale(inputs) if scheme.dynamic_activations else (statistics.peak / s).max() / INT8_MAX
    return float((fake_tokens(inputs, scale) @ rounded.T - x @ weight.T).square().sum())


class SmoothQuant(Calibrated):
    """``method: smoothquant``."""

    @classmethod
    def choose(cls, recipe: QuantizeRecipe) -> Options:
        return Options(smooth=ALPHAS)

    def scale_for(self, group: Group, weights: Sequence[Tensor], statistics: Statistics, scheme: QuantScheme) -> Smoothing:
        assert group.producer is not None
        return smooth_group(group.producer.reduce, weights, statistics, scheme, self.options.smooth)

    def solve(
        self, weights: Mapping[str, Tensor], schemes: Mapping[str, QuantScheme], statistics: Statistics
    ) -> dict[str, QuantizedWeight]:
        static = [n for n, s in schemes.items() if n in weights and s.activation_bits == 8 and not s.dynamic_activations]
        if static and not statistics.tokens:
            raise InputError(
                f"no calibration token reached {', '.join(static)}, and a static input scale needs some: "
                "calibrate on more text, or set dynamic_activations: true"
            )
        return {name: quantize_linear(weight, schemes[name], statistics) for name, weight in weights.items()}


def quantize_linear(weight: Tensor, scheme: QuantScheme, statistics: Statistics) -> QuantizedWeight:
    """``weight [O, I]`` rounded to nearest on a grid searched with ``diag(H)``, with the input scale a static scheme needs."""
    rounded = round_to_nearest(weight, scheme, statistics.diagonal if statistics.tokens else None)
    if scheme.activation_bits != 8 or scheme.dynamic_activations:
        return rounded
    return QuantizedWeight(rounded.codes, rounded.scale, rounded.zero_point, scheme, safe_scale(static_scale(statistics)))
