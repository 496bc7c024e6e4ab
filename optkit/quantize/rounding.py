"""Better codes and scales for a matrix that is quantized already: descent on the layer's own error.

GPTQ decides each column once. Here codes and scales are improved in turn on the same objective,
``f(Q) = tr((W - Q) H (W - Q)ᵀ)``, and every step can only lower it:

*Codes* (:func:`descend_codes`): coordinate descent. With everything else fixed, ``f`` is a parabola in one weight ``q_ij``,
with its minimum at ``q_ij - (E H)_ij / H_jj`` for ``E = Q - W``; the nearest code to that minimum is the best one. All rows
are independent, so one column of all rows is updated at a time and the gradient ``E H`` is kept up to date by a rank-1 update.

*Scales* (:func:`refit_scales`): with the codes fixed, ``q = Σ_g s_g c_g`` is linear in the scales of a row, so the best ones
solve a ``G x G`` system for each row: ``A_gh = c_gᵀ H_gh c_h``, ``b_g = (w H)_g · c_g``.

Cost of a sweep over codes: that of GPTQ's loop without the factorisation; of a refit: ``O(O I² + O G³)``. Scales are rounded
to the dtype they are stored in, and kept only for rows whose error went down, so the descent is monotone in what is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.checkpoint.affine import safe_scale
from optkit.quantize.grid import Grid, codes_to_weight

BLOCK = 128
RIDGE = 1e-6


def row_errors(error: Tensor, hessian: Tensor) -> Tensor:
    """``e H eᵀ`` of each row of ``error [O, I]``: ``[O]``."""
    return ((error @ hessian) * error).sum(-1)


def descend_codes(weight: Tensor, hessian: Tensor, codes: Tensor, grid: Grid, code_max: int, sweeps: int = 1) -> Tensor:
    """Codes ``[O, I]`` no worse than ``codes`` under ``hessian``, after ``sweeps`` passes over the columns."""
    inputs = weight.shape[1]
    scale, zero = grid.columns(inputs // grid.scale.shape[1])  # [I, O]
    inverse = scale.reciprocal()
    best = codes.T.contiguous()
    steps = hessian.diagonal().clamp(min=torch.finfo(torch.float32).tiny).reciprocal().tolist()
    gradient = hessian @ ((best - zero) * scale - weight.T)  # [I, O]
    for _ in range(sweeps):
        moved = False
        for start in range(0, inputs, BLOCK):
            stop = min(start + BLOCK, inputs)
            slope, near = gradient[start:stop], hessian[start:stop, start:stop]
            change = torch.empty_like(slope)
            for k in range(stop - start):
                at = start + k
                code = torch.addcmul(best[at], slope[k], inverse[at], value=-steps[at]).round_().clamp_(0, code_max)
                torch.mul(code - best[at], scale[at], out=change[k])
                best[at] = code
                slope.addr_(near[k], change[k])
            moved = moved or bool(change.any())
            gradient[:start].addmm_(hessian[:start, start:stop], change)
            gradient[stop:].addmm_(hessian[stop:, start:stop], change)
        if not moved:
            break
    return best.T.contiguous()


def refit_scales(weight: Tensor, hessian: Tensor, codes: Tensor, grid: Grid, storage: torch.dtype) -> Grid:
    """Scales that fit ``codes`` best under ``hessian``, as ``storage`` holds them; rows that would get worse keep theirs."""
    rows, inputs = weight.shape
    groups = grid.scale.shape[1]
    centred = codes.view(rows, groups, -1) - grid.zero_point.unsqueeze(-1)  # [O, G, g]
    flat = centred.view(rows, inputs)
    target = ((weight @ hessian) * flat).view(rows, groups, -1).sum(-1)  # [O, G]
    system = torch.empty(rows, groups, groups)
    for g, part in enumerate(hessian.view(groups, -1, inputs)):
        system[:, g] = ((centred[:, g] @ part) * flat).view(rows, groups, -1).sum(-1)
    ridge = RIDGE * system.diagonal(dim1=1, dim2=2) + torch.finfo(torch.float32).tiny
    system.diagonal(dim1=1, dim2=2).add_(ridge)
    solution, failed = torch.linalg.solve_ex(system, (target + ridge * grid.scale).unsqueeze(-1))
    scale = safe_scale(solution.squeeze(-1), storage)
    empty = (centred == 0).all(-1)  # a group of zeros fits any scale
    fitted = Grid(torch.where(empty, grid.scale, scale), grid.zero_point)
    before = row_errors(codes_to_weight(codes, grid) - weight, hessian)
    after = row_errors(codes_to_weight(codes, fitted) - weight, hessian)
    better = ((after < before) & (failed == 0)).unsqueeze(-1)
    return Grid(torch.where(better, fitted.scale, grid.scale), grid.zero_point)
