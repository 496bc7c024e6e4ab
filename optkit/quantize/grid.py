"""A matrix's grid as the algorithms work on it: float32 scales and zero points, symmetric or not, in one form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optkit.checkpoint.affine import QuantizedWeight
from optkit.scheme import QuantScheme


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


def storage_dtype(scale: Tensor) -> torch.dtype:
    """float16 when it holds every scale to its full precision (11 bits), else float32."""
    size = scale.abs()
    fits = float(size.max()) < 65504 and float(size.min()) >= torch.finfo(torch.float16).tiny
    return torch.float16 if fits else torch.float32
