"""GPTQ: round column after column, and let the columns still to come make up for the error (Frantar et al. 2022,
arXiv:2210.17323).

The error of a linear on calibration inputs ``X [T, I]`` is ``|(W - Q) Xᵀ|² = tr((W - Q) H (W - Q)ᵀ)`` with ``H = Xᵀ X``.
Rounding column ``j`` by ``e`` is best answered by moving the columns not yet rounded by ``-e U[j, j+1:] / U[j, j]``, where
``Uᵀ U = H⁻¹`` is the upper Cholesky factor. Columns go in the order of falling ``diag(H)`` (activation order) while the grid
of each group is fixed beforehand from the original weights (static groups), so the stored layout is the plain one.

What differs from the paper: scales are signed (scheme.py) and chosen by a search weighted with ``diag(H)``; everything runs on
``Wᵀ``, so that a column of ``W`` is one contiguous vector over all rows, and all linears that read the same input are stacked
into one such matrix: one factorisation and one loop serve them together.

Cost: ``O(I³)`` for the factor and ``O(O I²)`` for the loop; one ``[I, I]`` float32 and three ``[I, O]`` float32. Columns are
worked in blocks of :data:`BLOCK`, whose effect on the rest is applied by one matrix product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.checkpoint.affine import QuantizedWeight, safe_scale
from optkit.errors import VerificationError
from optkit.quantize import rounding, rtn
from optkit.quantize.grid import Grid, from_quantized, storage_dtype, to_quantized
from optkit.quantize.statistics import Statistics
from optkit.scheme import QuantScheme

BLOCK = 128
DAMPING = 0.01
MAX_DAMPING_STEPS = 6


def damped(hessian: Tensor, damping: float = DAMPING) -> Tensor:
    """``H`` plus ``damping`` times the mean of its diagonal on the diagonal; the identity for a matrix of zeros."""
    result = hessian.clone()
    diagonal = result.diagonal()
    mean = float(diagonal.mean())
    if not mean > 0:
        return torch.eye(len(result))
    diagonal += damping * mean
    return result


def inverse_factor(hessian: Tensor, damping: float = DAMPING) -> Tensor:
    """Upper triangular ``U`` with ``Uᵀ U = (H + damping)⁻¹``. The damping grows tenfold until the factorisation succeeds.

    Raises:
        VerificationError: ``H`` holds NaN or Inf: the calibration text drives the model out of range.
    """
    if not bool(hessian.isfinite().all()):
        raise VerificationError(
            "the calibration activations are not finite: the model overflows on this text; try another text"
        )
    for step in range(MAX_DAMPING_STEPS):
        lower, failed = torch.linalg.cholesky_ex(damped(hessian, damping * 10**step))
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper
    raise VerificationError(f"H [{len(hessian)}] is not positive definite even with damping {damping * 10**step:g}")


def gptq_codes(weight: Tensor, hessian: Tensor, grid: Grid, code_max: int, damping: float = DAMPING) -> tuple[Tensor, Tensor]:
    """Codes ``[O, I]`` (float32) of ``weight [O, I]`` on a fixed ``grid`` under ``hessian [I, I]``, and the weights as they
    stood when they were rounded, ``[O, I]``."""
    inputs = weight.shape[1]
    group = inputs // grid.scale.shape[1]
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    upper = inverse_factor(hessian[order][:, order], damping)
    scale, zero = (x[order] for x in grid.columns(group))  # [I, O]
    inverse = scale.reciprocal()
    left = weight.T[order].contiguous()  # [I, O]: the weights as they stand when their turn comes
    codes = torch.empty_like(left)
    for start in range(0, inputs, BLOCK):
        stop = min(start + BLOCK, inputs)
        errors = _round_block(left, codes, upper, (scale, inverse, zero), code_max, start, stop)
        if stop < inputs:
            left[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    back = torch.argsort(order)
    return codes[back].T.contiguous(), left[back].T.contiguous()


def _round_block(
    left: Tensor, codes: Tensor, upper: Tensor, grid: tuple[Tensor, Tensor, Tensor], code_max: int, start: int, stop: int
) -> Tensor:
    """Rounds the columns ``start:stop`` into ``codes``; returns their errors over the factor's diagonal, ``[n, O]``."""
    scale, inverse, zero = grid
    block, factor = left[start:stop], upper[start:stop, start:stop]
    steps = factor.diagonal().reciprocal().tolist()
    errors = torch.empty_like(block)
    for k in range(stop - start):
        at = start + k
        code = torch.addcmul(zero[at], block[k], inverse[at], out=codes[at]).round_().clamp_(0, code_max)
        error = torch.addcmul(block[k], code - zero[at], scale[at], value=-1, out=errors[k]).mul_(steps[k])
        if k + 1 < stop - start:
            block[k + 1 :].addr_(factor[k, k + 1 :], error, alpha=-1)
    return errors


def quantize_linear(
    weight: Tensor, scheme: QuantScheme, statistics: Statistics, damping: float = DAMPING, refits: int = 0
) -> QuantizedWeight:
    """:func:`quantize_and_trace` without the second result."""
    return quantize_and_trace(weight, scheme, statistics, damping, refits)[0]


def quantize_and_trace(
    weight: Tensor, scheme: QuantScheme, statistics: Statistics, damping: float = DAMPING, refits: int = 0
) -> tuple[QuantizedWeight, Tensor]:
    """Quantizes ``weight [O, I]`` by GPTQ on a grid searched with ``diag(H)``; linears with one input may be stacked along
    ``O``.

    Args:
        statistics: of the inputs; when no input was seen, the weight is rounded to nearest.
        damping: of ``H``, relative to the mean of its diagonal.
        refits: rounds of scale refit and code descent afterwards (rounding.py).

    Returns:
        The result, and the weights as they stood when they were rounded, ``[O, I]``.

    Raises:
        VerificationError: the statistics are not finite.
    """
    hessian = statistics.hessian
    importance = hessian.diagonal()
    if not statistics.tokens or float(importance.max()) == 0:
        return rtn.quantize_linear(weight, scheme), weight
    _, grid = from_quantized(rtn.quantize_linear(weight, scheme, importance))
    storage = storage_dtype(grid.scale)
    grid = Grid(safe_scale(grid.scale, storage), grid.zero_point)
    codes, latent = gptq_codes(weight, hessian, grid, scheme.code_max, damping)
    regular = damped(hessian, damping)
    for _ in range(refits):
        grid = rounding.refit_scales(weight, regular, codes, grid, storage)
        codes = rounding.descend_codes(weight, regular, codes, grid, scheme.code_max)
    return to_quantized(codes, grid, scheme), latent
