"""Modules that hold quantized weights and compute with their dequantized values.

The buffers are in the layout the runtimes read (packing.py, ``nbits``), so exporting them is a copy:

``weight_packed``      uint8 ``[O, G, g*bits/8]``
``weight_scale``       float ``[O, G]``
``weight_zero_point``  uint8 ``[O, ceil(G*bits/8)]``, packed the same way, or ``None``
``weight_shift``       float32 ``[O, G]``, of a shifted scheme, or ``None``
``input_scale``        scalar, for 8-bit activations with a calibrated scale, or ``None``

With 8-bit activations the input is rounded to int8 first, per token or with ``input_scale``, and multiplied in floating point.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from optkit import packing
from optkit.checkpoint.affine import QuantizedWeight, dequantize, fake_quantize_inputs
from optkit.scheme import QuantScheme


def pack_weight(quantized: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(weight_packed, weight_scale, weight_zero_point)`` of a quantized matrix."""
    scheme, codes = quantized.scheme, quantized.codes.cpu().numpy()
    group = codes.shape[1] // scheme.groups(codes.shape[1])
    packed = torch.from_numpy(packing.pack_nbits(codes, scheme.num_bits, group))
    zero_point = quantized.zero_point
    if zero_point is not None:
        zero_point = torch.from_numpy(packing.pack_bytes(zero_point.cpu().numpy(), scheme.num_bits))
    return packed, quantized.scale.contiguous(), zero_point


def unpack_weight(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: QuantScheme, shift: Tensor | None = None
) -> QuantizedWeight:
    """The inverse of :func:`pack_weight`; ``shift`` is kept beside it."""
    group = packed.shape[-1] * 8 // scheme.num_bits
    codes = torch.from_numpy(packing.unpack_nbits(packed.cpu().numpy(), scheme.num_bits, group))
    if zero_point is not None:
        zero_point = torch.from_numpy(packing.unpack_bytes(zero_point.cpu().numpy(), scheme.num_bits, scale.shape[1]))
    return QuantizedWeight(codes, scale, zero_point, scheme, shift=shift)


def unpack_codes(packed: Tensor, num_bits: int) -> Tensor:
    """``[..., g*bits/8]`` bytes -> ``[..., g]`` codes, in torch (works on any device and while tracing)."""
    if num_bits == 8:
        return packed
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


def dequantize_packed(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, num_bits: int, shift: Tensor | None = None
) -> Tensor:
    """``[O, G, bytes]`` -> float32 ``[O, I]``, with the formula of affine.py."""
    codes = unpack_codes(packed, num_bits).float()
    if zero_point is None:
        offset: Tensor | float = float(1 << (num_bits - 1))
    else:
        offset = unpack_codes(zero_point, num_bits)[..., : scale.shape[-1]].float().unsqueeze(-1)
    weight = (codes - offset) * scale.float().unsqueeze(-1)
    return (weight if shift is None else weight + shift.float().unsqueeze(-1)).flatten(-2)


class QuantLinear(nn.Module):
    """``y = x @ dequantize(W).T + bias`` with ``x [..., I]`` and ``W [O, I]``; computed in ``x``'s dtype."""

    weight_packed: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor | None
    weight_shift: Tensor | None
    bias: Tensor | None
    input_scale: Tensor | None
    rounds_inputs = True  # False computes with 8-bit activations as they were before rounding

    def __init__(
        self,
        packed: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        scheme: QuantScheme,
        bias: Tensor | None = None,
        input_scale: Tensor | None = None,
        shift: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.scheme = scheme
        self.out_features = packed.shape[0]
        self.in_features = packed.shape[1] * packed.shape[2] * 8 // scheme.num_bits
        self.group_size = self.in_features // packed.shape[1]
        self.register_buffer("weight_packed", packed)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("weight_zero_point", zero_point)
        self.register_buffer("weight_shift", shift)
        self.register_buffer("bias", bias)
        self.register_buffer("input_scale", input_scale)

    @classmethod
    def from_quantized(cls, quantized: QuantizedWeight, bias: Tensor | None = None) -> QuantLinear:
        return cls(*pack_weight(quantized), quantized.scheme, bias, quantized.input_scale, quantized.shift)

    def dequantized(self) -> Tensor:
        """float32 ``[O, I]``."""
        return dequantize_packed(
            self.weight_packed, self.weight_scale, self.weight_zero_point, self.scheme.num_bits, self.weight_shift
        )

    @property
    def weight(self) -> Tensor:
        return self.dequantized()

    def forward(self, x: Tensor) -> Tensor:
        if self.scheme.activation_bits == 8 and self.rounds_inputs:
            x = fake_quantize_inputs(x, self.input_scale)
        return nn.functional.linear(x, self.dequantized().to(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.scheme.describe()}"


class QuantEmbedding(nn.Module):
    """``ids [...] -> [..., I]``: rows of a quantized ``[V, I]`` table in ``dtype``, times a constant ``factor``.

    ``dtype`` is the scale's when not given.
    """

    weight_packed: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor | None
    weight_shift: Tensor | None

    def __init__(
        self,
        packed: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        scheme: QuantScheme,
        factor: float = 1.0,
        dtype: torch.dtype | None = None,
        shift: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.scheme = scheme
        self.factor = factor
        self.dtype = dtype or scale.dtype
        self.num_embeddings = packed.shape[0]
        self.embedding_dim = packed.shape[1] * packed.shape[2] * 8 // scheme.num_bits
        self.group_size = self.embedding_dim // packed.shape[1]
        self.register_buffer("weight_packed", packed)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("weight_zero_point", zero_point)
        self.register_buffer("weight_shift", shift)

    @classmethod
    def from_quantized(
        cls, quantized: QuantizedWeight, factor: float = 1.0, dtype: torch.dtype | None = None
    ) -> QuantEmbedding:
        return cls(*pack_weight(quantized), quantized.scheme, factor, dtype, quantized.shift)

    def dequantized(self) -> Tensor:
        """float32 ``[V, I]``, without the factor."""
        return dequantize_packed(
            self.weight_packed, self.weight_scale, self.weight_zero_point, self.scheme.num_bits, self.weight_shift
        )

    @property
    def weight(self) -> Tensor:
        return self.dequantized()

    def forward(self, ids: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        zero_point = None if self.weight_zero_point is None else self.weight_zero_point[flat]
        shift = None if self.weight_shift is None else self.weight_shift[flat]
        rows = dequantize_packed(self.weight_packed[flat], self.weight_scale[flat], zero_point, self.scheme.num_bits, shift)
        rows = rows.to(self.dtype).reshape(*ids.shape, self.embedding_dim)
        return rows if self.factor == 1.0 else rows * self.factor


__all__ = ["QuantEmbedding", "QuantLinear", "dequantize", "dequantize_packed", "pack_weight", "unpack_codes", "unpack_weight"]
