"""Integer codes to bytes and back, in numpy.

Codes are unsigned, ``uint8`` in ``[0, 2**num_bits - 1]``, one per element. Layouts, all little-endian:

``bytes``       4-bit: two codes a byte, the even index in the low nibble, the odd one in the high nibble; 8-bit: one each.
                Along the last axis; an odd length is padded with code 0. (ONNX int4 tensors, ORT ``MatMulNBits``.)
``int32``       ``32 / num_bits`` codes a 32-bit word, code ``j`` in bits ``[j*num_bits, (j+1)*num_bits)``, along an axis that
                is padded with zeros. compressed-tensors stores weights this way along the last axis (``pack-quantized``) with
                codes offset by ``2**(num_bits-1)``, and zero points along the first axis.
``nbits``       ORT ``MatMulNBits``: weights ``[O, G, group_size*num_bits/8]`` bytes, zero points ``[O, ceil(G*num_bits/8)]``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]


def _check(codes: np.ndarray, num_bits: int) -> U8:
    if num_bits not in (4, 8):
        raise ValueError(f"num_bits {num_bits}: 4 or 8")
    if codes.dtype != np.uint8:
        raise TypeError(f"codes are uint8, not {codes.dtype}")
    if num_bits == 4 and codes.size and int(codes.max()) > 15:
        raise ValueError("a 4-bit code is above 15")
    return codes


def pack_bytes(codes: np.ndarray, num_bits: int) -> U8:
    """``[..., N]`` codes -> ``[..., ceil(N*num_bits/8)]`` bytes."""
    codes = _check(codes, num_bits)
    if num_bits == 8:
        return np.ascontiguousarray(codes)
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], 1), np.uint8)], -1)
    return np.ascontiguousarray(codes[..., 0::2] | (codes[..., 1::2] << 4))


def unpack_bytes(packed: np.ndarray, num_bits: int, length: int) -> U8:
    """The first ``length`` codes of each row of :func:`pack_bytes`."""
    if num_bits == 8:
        return np.ascontiguousarray(packed[..., :length])
    out = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    out[..., 0::2] = packed & 0xF
    out[..., 1::2] = packed >> 4
    return np.ascontiguousarray(out[..., :length])


def pack_int32(codes: np.ndarray, num_bits: int, axis: int = -1) -> NDArray[np.int32]:
    """Codes -> little-endian 32-bit words along ``axis`` (padded with zero codes)."""
    codes = np.moveaxis(_check(codes, num_bits), axis, -1)
    per_word = 32 // num_bits
    short = -codes.shape[-1] % per_word
    if short:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], short), np.uint8)], -1)
    words = pack_bytes(codes, num_bits).view("<i4")
    return np.moveaxis(words, -1, axis).copy(order="C")  # a copy, so that axes of size 1 get ordinary strides too


def unpack_int32(words: np.ndarray, num_bits: int, length: int, axis: int = -1) -> U8:
    """The first ``length`` codes along ``axis`` of :func:`pack_int32`."""
    rows = np.ascontiguousarray(np.moveaxis(words, axis, -1)).astype("<i4", copy=False)
    codes = unpack_bytes(rows.view(np.uint8), num_bits, length)
    return np.ascontiguousarray(np.moveaxis(codes, -1, axis))


def pack_nbits(codes: np.ndarray, num_bits: int, group_size: int) -> U8:
    """``[O, I]`` codes -> ``[O, G, group_size*num_bits/8]`` bytes for ORT ``MatMulNBits``; ``group_size`` divides ``I``."""
    rows, inputs = codes.shape
    if inputs % group_size:
        raise ValueError(f"group_size {group_size} does not divide {inputs}")
    return pack_bytes(codes.reshape(rows, inputs // group_size, group_size), num_bits)


def unpack_nbits(packed: np.ndarray, num_bits: int, group_size: int) -> U8:
    """``[O, G, bytes]`` -> ``[O, I]`` codes."""
    return unpack_bytes(packed, num_bits, group_size).reshape(packed.shape[0], -1)
