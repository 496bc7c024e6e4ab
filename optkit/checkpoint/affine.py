"""The one home of the scale / zero-point formula.

``w ≈ (code - zero_point) * scale`` with ``code`` in ``[0, 2**b - 1]`` (scheme.py). Weights are ``[O, I]``, grouped as ``[O, G,
g]`` where ``g = I / G``; scales ``[O, G]`` float, zero points ``[O, G]`` uint8 or ``None`` for the fixed mid-range one. All
functions compute in float32 and are pure.

Formats made elsewhere have an offset that is no multiple of the scale (GGUF: ``d * code + m``). They are read as
``(code - zero_point) * scale + shift``, with the integer zero point nearest to the offset, so that kernels see centred codes,
and a shift for the rest (:func:`split_offset`). The sum is the same number, bit for bit.

4-bit symmetric scales are *signed*: with ``m`` the signed value of the largest magnitude of a group, ``scale = -m / 8`` maps
``m`` to code 0 and uses all 16 codes; ``amax / 7`` would leave one unused and costs about 13 % more squared error. 8-bit ones
are positive, ``amax / 127``. A group of zeros gets scale 1 and mid-range codes, so it comes back as exact zeros and never as
NaN.

Scales are stored as float16 with 8 significant bits, and codes are chosen for the stored value. 8 bits are what bfloat16 has,
so a scale is the same number in float32, float16 and bfloat16; and a symmetric 4-bit weight (a multiple of the scale by at most
8) is the same number in float32 and float16. So every reader computes with the same weights whatever it casts to. The coarser
scale moves a weight by at most 0.2 %, which codes chosen for it make up for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optkit.scheme import QuantScheme

SCALE_DTYPE = torch.float16


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized matrix.

    Attributes:
        codes: ``[O, I]`` uint8, unsigned codes.
        scale: ``[O, G]`` floating point, may be negative when symmetric.
        zero_point: ``[O, G]`` uint8, or ``None`` when symmetric.
        scheme: how.
        shift: ``[O, G]`` float32 of a shifted scheme, added to the product, else ``None``.
        input_scale: of calibrated 8-bit activations, a scalar: ``x ≈ round(x / input_scale) * input_scale``.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    scheme: QuantScheme
    input_scale: Tensor | None = None
    shift: Tensor | None = None

    def __post_init__(self) -> None:
        rows, inputs = self.codes.shape
        groups = self.scheme.groups(inputs)
        if self.codes.dtype != torch.uint8:
            raise TypeError(f"codes are uint8, not {self.codes.dtype}")
        if tuple(self.scale.shape) != (rows, groups):
            raise ValueError(f"scale has shape {tuple(self.scale.shape)}, and {(rows, groups)} is needed")
        if (self.zero_point is None) != self.scheme.symmetric:
            raise ValueError("a zero point goes with an asymmetric scheme, and only with one")
        if self.zero_point is not None and tuple(self.zero_point.shape) != (rows, groups):
            raise ValueError(f"zero_point has shape {tuple(self.zero_point.shape)}, and {(rows, groups)} is needed")
        if (self.shift is not None) != self.scheme.shifted:
            raise ValueError("a shift goes with a shifted scheme, and only with one")
        if self.shift is not None and tuple(self.shift.shape) != (rows, groups):
            raise ValueError(f"shift has shape {tuple(self.shift.shape)}, and {(rows, groups)} is needed")


def grouped(weight: Tensor, scheme: QuantScheme) -> Tensor:
    """``[O, I]`` -> ``[O, G, g]``."""
    return weight.unflatten(-1, (scheme.groups(weight.shape[-1]), -1))


def signed_peak(groups: Tensor) -> Tensor:
    """The signed value of the largest magnitude of each group, ``[O, G, g]`` -> ``[O, G]``."""
    index = groups.abs().argmax(-1, keepdim=True)
    return groups.gather(-1, index).squeeze(-1)


def peak_scale(groups: Tensor, scheme: QuantScheme) -> Tensor:
    """Symmetric scale of each group, ``[O, G]``: at 4 bits signed, so that all 16 codes are used; at 8 bits positive.

    One code of 256 is worth little, and TensorRT takes no negative INT8 scales.
    """
    if scheme.num_bits == 8:
        return groups.abs().amax(-1) / (scheme.zero_point - 1)
    return signed_peak(groups) / -scheme.zero_point


def safe_scale(scale: Tensor, storage: torch.dtype = SCALE_DTYPE) -> Tensor:
    """``scale`` as it is stored, in float32; what is zero, not finite or underflows there becomes 1.

    Args:
        scale: any shape.
        storage: float16 keeps 8 significant bits (see above), another dtype its own.
    """
    if storage == torch.float16:
        scale = scale.to(torch.bfloat16)
    stored = scale.to(storage).float()
    usable = stored.isfinite() & (stored != 0)
    return torch.where(usable, stored, torch.ones_like(stored))


def range_scale(weight: Tensor, scheme: QuantScheme, storage: torch.dtype = SCALE_DTYPE) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point from the range of each group: signed full range, or min/max (zero included) when asymmetric."""
    groups = grouped(weight.float(), scheme)
    if scheme.symmetric:
        return safe_scale(peak_scale(groups, scheme), storage), None
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = safe_scale((high - low) / scheme.code_max, storage)
    return scale, (-low / scale).round().clamp(0, scheme.code_max).to(torch.uint8)


def quantize(weight: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: QuantScheme) -> QuantizedWeight:
    """Rounds ``weight [O, I]`` to the nearest code of the given grid."""
    offset = float(scheme.zero_point) if zero_point is None else zero_point.float().unsqueeze(-1)
    codes = (grouped(weight.float(), scheme) / scale.float().unsqueeze(-1)).add_(offset).round_()
    codes = codes.clamp_(0, scheme.code_max).to(torch.uint8).flatten(-2)
    return QuantizedWeight(codes, scale, zero_point, scheme)


def dequantize(quantized: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[O, I]`` weights of a quantized matrix: float32 arithmetic, one rounding to ``dtype`` at the end."""
    scheme = quantized.scheme
    codes = grouped(quantized.codes.float(), scheme)
    zero_point = quantized.zero_point
    offset = float(scheme.zero_point) if zero_point is None else zero_point.float().unsqueeze(-1)
    codes.sub_(offset).mul_(quantized.scale.float().unsqueeze(-1))
    if quantized.shift is not None:
        codes.add_(quantized.shift.unsqueeze(-1))
    return codes.flatten(-2).to(dtype)


def split_offset(scale: Tensor, offset: Tensor, code_max: int) -> tuple[Tensor, Tensor]:
    """``(zero_point, shift)`` with ``(code - zero_point) * scale + shift == code * scale + offset`` for every code.

    The zero point is the nearest to ``-offset / scale`` for which ``offset + zero_point * scale`` is exact in float32, so that
    both sides are the same sum, rounded once (their products are exact for the scales files have: 17 significant bits at most,
    times codes of at most 7); where it is not exact the zero point is 0 and the shift the offset.

    Args:
        scale, offset: ``[O, G]`` float32.
        code_max: the largest zero point.

    Returns:
        uint8 and float32 ``[O, G]``.
    """
    zero_point = torch.where(scale == 0, 0, -offset / scale).nan_to_num_(0, 0, 0).round_().clamp_(0, code_max)
    exact = offset.double() + zero_point.double() * scale.double()
    shift = exact.float()
    usable = shift.double() == exact
    zero_point, shift = torch.where(usable, zero_point, 0), torch.where(usable, shift, offset)
    return zero_point.to(torch.uint8), shift


def row_parts(quantized: QuantizedWeight, rows: int) -> Iterator[QuantizedWeight]:
    """A quantized matrix in parts of at most ``rows`` rows, which share its memory; for work that needs little memory of its
    own."""
    for start in range(0, quantized.codes.shape[0], rows):
        part = slice(start, start + rows)
        zero_point = None if quantized.zero_point is None else quantized.zero_point[part]
        shift = None if quantized.shift is None else quantized.shift[part]
        yield replace(quantized, codes=quantized.codes[part], scale=quantized.scale[part], zero_point=zero_point, shift=shift)


def take_rows(quantized: QuantizedWeight, order: Tensor) -> QuantizedWeight:
    """The rows ``order`` (int64) of a quantized matrix."""
    zero_point = None if quantized.zero_point is None else quantized.zero_point[order]
    shift = None if quantized.shift is None else quantized.shift[order]
    return replace(quantized, codes=quantized.codes[order], scale=quantized.scale[order], zero_point=zero_point, shift=shift)


def fake_quantize(weight: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: QuantScheme) -> Tensor:
    """``dequantize(quantize(weight))`` in ``weight``'s dtype."""
    return dequantize(quantize(weight, scale, zero_point, scheme), weight.dtype)


def fake_quantize_inputs(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Activations as symmetric int8 makes them, ``[..., I]`` in ``x``'s dtype.

    Args:
        x: activations.
        scale: the calibrated scalar scale, or ``None`` for one per token: ``amax / 127.5``, as compressed-tensors has it.
    """
    if scale is None:
        scale = x.abs().amax(-1, keepdim=True) / 127.5
        scale = torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)
    return (x / scale).round().clamp(-128, 127) * scale
