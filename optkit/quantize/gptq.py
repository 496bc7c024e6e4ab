"""GPTQ: round column after column, and let the columns still to come make up for the error (Frantar et al. 2022, arXiv:2210.17323).

The error of a linear on calibration inputs ``X [T, I]`` is ``|(W - Q) Xᵀ|² = tr((W - Q) H (W - Q)ᵀ)`` with ``H = Xᵀ X``. Rounding column
``j`` by ``e`` is best answered by moving the columns not yet rounded by ``-e U[j, j+1:] / U[j, j]``, where ``Uᵀ U = H⁻¹`` is the upper
Cholesky factor. Columns go in the order of falling ``diag(H)`` (activation order) while the grid of each group is fixed beforehand
from the original weights (static groups), so the stored layout is the plain one.

What differs from the paper: scales are signed (scheme.py) and chosen by a search weighted with ``diag(H)``; everything runs on
``Wᵀ``, so that a column of ``W`` is one contiguous vector over all rows, and all linears that read the same input are stacked into one
such matrix: one factorisation and one loop serve them together.

Cost: ``O(I³)`` for the factor and ``O(O I²)`` for the loop; one ``[I, I]`` float32 and three ``[I, O]`` float32. Columns are worked in
blocks of :data:`BLOCK`, whose effect on the rest is applied by one matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optkit.checkpoint.affine import QuantizedWeight
from optkit.errors import VerificationError
from optkit.scheme import QuantScheme

BLOCK = 128
DAMPING = 0.01
MAX_DAMPING_STEPS = 6


@dataclass
class Grid:
    """Scales and zero points of a matrix ``[O, I]``, float32, one for each group.

    Attributes:
        scale: ``[O, G]``, signed when symmetric, never 0.
        zero_point: ``[O, G]`` (whole numbers), also for symmetric schemes, where all are the mid-range code.
    """

    scale: Tensor
    zero_point: Tensor

    def rows(self, part: slice) -> Grid:
        return Grid(self.scale[part], self.zero_point[part])

    def columns(self, group: int) -> tuple[Tensor, Tensor]:
        """``([I, O], [I, O])``: scale and zero point of each weight, transposed."""
        return tuple(x.T.repeat_interleave(group, 0).contiguous() for x in (self.scale, self.zero_point))  # type: ignore[return-value]


def codes_to_weight(codes: Tensor, grid: Grid) -> Tensor:
    """``[O, I]`` float codes -> ``[O, I]`` weights."""
    shape = (codes.shape[0], grid.scale.shape[1], -1)
    return ((codes.view(shape) - grid.zero_point.unsqueeze(-1)) * grid.scale.unsqueeze(-1)).view(codes.shape)


def to_quantized(codes: Tensor, grid: Grid, scheme: QuantScheme) -> QuantizedWeight:
    zero_point = None if scheme.symmetric else grid.zero_point.to(torch.uint8)
    return QuantizedWeight(codes.to(torch.uint8), grid.scale.clone(), zero_point, scheme)


def from_quantized(quantized: QuantizedWeight) -> tuple[Tensor, Grid]:
    """Float codes and the grid of a quantized matrix."""
    scale = quantized.scale.float()
    if quantized.zero_point is None:
        return quantized.codes.float(), Grid(scale, torch.full_like(scale, float(quantized.scheme.zero_point)))
    return quantized.codes.float(), Grid(scale, quantized.zero_point.float())


def damped(hessian: Tensor, damping: float = DAMPING) -> Tensor:
    """``H`` plus ``damping`` times the mean of its diagonal; inputs that were always 0 get that mean, so that ``H`` is regular."""
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
        raise VerificationError("the calibration activations are not finite: the model overflows on this text; try another text")
    for step in range(MAX_DAMPING_STEPS):
        lower, failed = torch.linalg.cholesky_ex(damped(hessian, damping * 10**step))
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper
    raise VerificationError(f"H [{len(hessian)}] is not positive definite even with damping {damping * 10**step:g}")


def gptq_codes(weight: Tensor, hessian: Tensor, grid: Grid, code_max: int, damping: float = DAMPING) -> Tensor:
    """Codes ``[O, I]`` (float32) of ``weight [O, I]`` on a fixed ``grid`` under ``hessian [I, I]``."""
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
    result = torch.empty_like(codes)
    result[order] = codes
    return result.T.contiguous()


def _round_block(
    left: Tensor, codes: Tensor, upper: Tensor, grid: tuple[Tensor, Tensor, Tensor], code_max: int, start: int, stop: int
) -> Tensor:
    """Rounds the columns ``start:stop`` into ``codes``; returns their errors over the factor's diagonal, ``[stop - start, O]``."""
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
