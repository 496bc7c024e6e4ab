"""GGUF's blocks as codes and scales, bit for bit, and codes and scales as blocks.

Every block type below is affine: a weight is ``code * scale + offset`` with one scale (and offset) for 16 or 32 consecutive
inputs, so each is a scheme of optkit's and nothing is rounded again. What does not fill a 4-bit code (5 and 6 bits, IQ4's
table of 8-bit levels) takes an 8-bit one, which costs size and no accuracy.

========= ============================ ======================== =====================================================
type      scheme                       weight                   stored in a block
========= ============================ ======================== =====================================================
Q4_0      w4 g32 sym                   d·(q-8)                  d f16, 16 bytes: q of inputs 0-15 low, 16-31 high
Q4_1      w4 g32 asym shifted          d·q + m                  d, m f16, 16 bytes
Q5_0      w8 g32 sym                   d·(q-16)                 d f16, u32 of fifth bits, 16 bytes
Q5_1      w8 g32 asym shifted          d·q + m                  d, m f16, u32, 16 bytes
Q8_0      w8 g32 sym                   d·q                      d f16, 32 int8
Q2_K      w4 g16 asym shifted          d·s·q - dmin·t           16 bytes (s low, t high), 64 bytes, d, dmin f16
Q3_K      w4 g16 sym                   d·(s-32)·(q-4)           32 bytes of third bits, 64, 12 bytes of 6-bit s, d f16
Q4_K      w4 g32 asym shifted          d·s·q - dmin·t           d, dmin f16, 12 bytes of 6-bit s and t, 128 bytes
Q5_K      w8 g32 asym shifted          d·s·q - dmin·t           d, dmin f16, 12 bytes, 32 bytes of fifth bits, 128
Q6_K      w8 g16 sym                   d·s·(q-32)               128 bytes low, 64 bytes high bits, 16 int8 s, d f16
IQ4_NL    w8 g32 sym                   d·level[q]               d f16, 16 bytes
IQ4_XS    w8 g32 sym                   d·(s-32)·level[q]        d f16, u16 + 4 bytes of 6-bit s, 128 bytes
========= ============================ ======================== =====================================================

Written are Q4_0, Q4_1 and Q8_0 (:func:`to_blocks`): the same codes, each group's scale once for every 32 inputs.

Source: the block structures of ggml (``ggml-common.h``) and the ``gguf`` package, which the tests compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from optkit.checkpoint.affine import QuantizedWeight, split_offset
from optkit.checkpoint.gguf_file import TYPES
from optkit.errors import UnsupportedError
from optkit.scheme import QuantScheme

Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # codes [N, E] uint8, scale [N, S] f32, offset [N, S] f32
IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)
_LOW_HIGH = np.array([0, 4], np.uint8)
_PAIRS = np.array([0, 2, 4, 6], np.uint8)
_BITS = np.arange(8, dtype=np.uint8)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte ``at`` of each block, float32 ``[N, 1]``."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(data: np.ndarray, run: int) -> np.ndarray:
    """Bytes in runs of ``run``: a run's low nibbles, then its high ones."""
    parts = data.reshape(len(data), -1, 1, run) >> _LOW_HIGH[:, None]
    return (parts & 0xF).reshape(len(data), -1)


def _q4_0(b: np.ndarray) -> Parts:
    return _nibbles(b[:, 2:], 16), _half(b, 0), None


def _q4_1(b: np.ndarray) -> Parts:
    return _nibbles(b[:, 4:], 16), _half(b, 0), _half(b, 2)


def _fifth_bits(data: np.ndarray) -> np.ndarray:
    """4 bytes ``[N, 4]`` -> the 32 bits as 0 or 16."""
    return ((data[:, :, None] >> _BITS) & 1).reshape(len(data), 32) << 4


def _q5_0(b: np.ndarray) -> Parts:
    return (_nibbles(b[:, 6:], 16) | _fifth_bits(b[:, 2:6])) + np.uint8(128 - 16), _half(b, 0), None


def _q5_1(b: np.ndarray) -> Parts:
    return _nibbles(b[:, 8:], 16) | _fifth_bits(b[:, 4:8]), _half(b, 0), _half(b, 2)


def _q8_0(b: np.ndarray) -> Parts:
    return b[:, 2:] ^ np.uint8(0x80), _half(b, 0), None  # int8 + 128


def _q2_k(b: np.ndarray) -> Parts:
    scales = b[:, :16]
    codes = (b[:, 16:80].reshape(len(b), -1, 1, 32) >> _PAIRS[:, None]) & 3
    scale = _half(b, 80) * (scales & 0xF).astype(np.float32)
    return codes.reshape(len(b), 256), scale, -(_half(b, 82) * (scales >> 4).astype(np.float32))


def _q3_k(b: np.ndarray) -> Parts:
    low = (b[:, 32:96].reshape(len(b), -1, 1, 32) >> _PAIRS[:, None]) & 3
    high = (b[:, :32].reshape(len(b), 1, 1, 32) >> _BITS.reshape(2, 4, 1)) & 1
    codes = (low | (high << 2)).reshape(len(b), 256) + np.uint8(4)  # 0..7 means -4..3; the middle of 4 bits is 8
    packed = b[:, 96:108]
    lows = np.concatenate([packed[:, :8] & 0xF, packed[:, :8] >> 4], 1)
    highs = ((packed[:, None, 8:] >> _PAIRS[:, None]) & 3).reshape(len(b), 16)
    signed = (lows | (highs << 4)).astype(np.float32) - 32
    return codes, _half(b, 108) * signed, None


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes -> eight 6-bit scales and eight 6-bit minima."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 0x3F, (third & 0xF) | ((first >> 2) & 0x30)], 1)
    minima = np.concatenate([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)], 1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q4_k(b: np.ndarray) -> Parts:
    scales, minima = _k_scales(b[:, 4:16])
    return _nibbles(b[:, 16:], 32), _half(b, 0) * scales, -(_half(b, 2) * minima)


def _q5_k(b: np.ndarray) -> Parts:
    scales, minima = _k_scales(b[:, 4:16])
    fifth = ((b[:, None, 16:48] >> _BITS[:, None]) & 1).reshape(len(b), 256) << 4
    return _nibbles(b[:, 48:], 32) | fifth, _half(b, 0) * scales, -(_half(b, 2) * minima)


def _q6_k(b: np.ndarray) -> Parts:
    low = _nibbles(b[:, :128], 64)
    high = ((b[:, 128:192].reshape(len(b), -1, 1, 32) >> _PAIRS[:, None]) & 3).reshape(len(b), 256)
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return (low | (high << 4)) + np.uint8(128 - 32), _half(b, 208) * scales, None


def _levels(codes: np.ndarray) -> np.ndarray:
    return (IQ4_LEVELS + 128).astype(np.uint8)[codes]


def _iq4_nl(b: np.ndarray) -> Parts:
    return _levels(_nibbles(b[:, 2:], 16)), _half(b, 0), None


def _iq4_xs(b: np.ndarray) -> Parts:
    highs = np.ascontiguousarray(b[:, 2:4]).view(np.uint16)
    lows = ((b[:, 4:8, None] >> _LOW_HIGH) & 0xF).reshape(len(b), 8)
    scales = lows | (((highs >> (2 * np.arange(8, dtype=np.uint16))) & 3).astype(np.uint8) << 4)
    return _levels(_nibbles(b[:, 8:], 16)), _half(b, 0) * (scales.astype(np.float32) - 32), None


@dataclass(frozen=True)
class Block:
    """A block type: the scheme it is, and what takes blocks ``[N, bytes]`` apart."""

    scheme: QuantScheme
    parts: Callable[[np.ndarray], Parts]


def _block(bits: int, group: int, shifted: bool, parts: Callable[[np.ndarray], Parts]) -> Block:
    return Block(QuantScheme(bits, symmetric=not shifted, group_size=group, shifted=shifted), parts)


BLOCKS: dict[str, Block] = {
    "Q4_0": _block(4, 32, False, _q4_0),
    "Q4_1": _block(4, 32, True, _q4_1),
    "Q5_0": _block(8, 32, False, _q5_0),
    "Q5_1": _block(8, 32, True, _q5_1),
    "Q8_0": _block(8, 32, False, _q8_0),
    "Q2_K": _block(4, 16, True, _q2_k),
    "Q3_K": _block(4, 16, False, _q3_k),
    "Q4_K": _block(4, 32, True, _q4_k),
    "Q5_K": _block(8, 32, True, _q5_k),
    "Q6_K": _block(8, 16, False, _q6_k),
    "IQ4_NL": _block(8, 32, False, _iq4_nl),
    "IQ4_XS": _block(8, 32, False, _iq4_xs),
}
SIZES = {name: (elements, size) for name, elements, size in TYPES.values()}


def quantized_blocks(data: np.ndarray, kind: str) -> QuantizedWeight:
    """Blocks -> codes and scales.

    Args:
        data: uint8 ``[O, bytes of a row]``.
        kind: a key of :data:`BLOCKS`.

    Returns:
        ``[O, I]`` codes with float32 scales (and zero points and shifts).
    """
    block, (elements, size) = BLOCKS[kind], SIZES[kind]
    rows, inputs = data.shape[0], data.shape[1] // size * elements
    codes, scale, offset = block.parts(data.reshape(-1, size))
    whole = torch.from_numpy(np.ascontiguousarray(codes).reshape(rows, inputs))
    scales = torch.from_numpy(np.ascontiguousarray(scale).reshape(rows, -1))
    if offset is None:
        return QuantizedWeight(whole, scales, None, block.scheme)
    offsets = torch.from_numpy(np.ascontiguousarray(offset).reshape(rows, -1))
    zero_point, shift = split_offset(scales, offsets, block.scheme.code_max)
    return QuantizedWeight(whole, scales, zero_point, block.scheme, shift=shift)


BLOCK = 32  # inputs of a block of the types that are written


def block_type(scheme: QuantScheme, inputs: int) -> str:
    """The block type that holds a scheme's codes.

    Args:
        scheme: of the weights.
        inputs: ``in_features``.

    Raises:
        UnsupportedError: none does; says why.
    """
    kind = {(4, True): "Q4_0", (4, False): "Q4_1", (8, True): "Q8_0"}.get((scheme.num_bits, scheme.symmetric))
    if kind is None:
        raise UnsupportedError("GGUF has no blocks of 8 bits with zero points: quantize with symmetric: true")
    if scheme.activation_bits == 8:
        raise UnsupportedError("GGUF holds weights only, and these have calibrated 8-bit activations: use w8a16 or w4a16")
    size = scheme.group_size or inputs
    if size % BLOCK:
        raise UnsupportedError(f"GGUF shares a scale between {BLOCK} inputs, and groups of {size} are no multiple of that")
    return kind


def to_blocks(quantized: QuantizedWeight) -> tuple[np.ndarray, int]:
    """Codes and scales as blocks of :func:`block_type`, the inverse of :func:`quantized_blocks`.

    Returns:
        uint8 ``[O, bytes of a row]``, and how many scales and offsets float16 did not hold exactly: an offset ``-z * s`` can
        have a bit too many, which moves the weights of its group by at most 2**-12 of the offset.

    Raises:
        UnsupportedError: no block type holds it, or a scale is beyond float16.
    """
    scheme, (rows, inputs) = quantized.scheme, quantized.codes.shape
    kind = block_type(scheme, inputs)
    repeats = (scheme.group_size or inputs) // BLOCK
    scale = quantized.scale.float()
    parts = [scale]
    if quantized.zero_point is not None:
        offset = -quantized.zero_point.float() * scale
        parts.append(offset + (0.0 if quantized.shift is None else quantized.shift))  # + 0.0: no negative zero
    halves = [part.half() for part in parts]
    if not all(bool(half.isfinite().all()) for half in halves):
        raise UnsupportedError("a scale is larger than float16 holds, which is what GGUF stores scales in")
    rounded = sum(int((half.float() != part).sum()) for half, part in zip(halves, parts, strict=True))
    heads = [half.repeat_interleave(repeats, 1).numpy().reshape(-1, 1).view(np.uint8) for half in halves]
    codes = quantized.codes.numpy().reshape(-1, BLOCK)
    if kind == "Q8_0":
        body = codes ^ np.uint8(0x80)  # unsigned codes -> int8
    else:
        body = codes[:, : BLOCK // 2] | (codes[:, BLOCK // 2 :] << np.uint8(4))
    return np.concatenate([*heads, body], 1).reshape(rows, -1), rounded
