"""Target ``onnx``: operators of the ONNX standard only (opset 24), for any runtime.

====================  ====================================================================================================
attention             ``TensorScatter`` of the new keys and values into the buffers, ``Attention`` with a bool mask over the
                      visible slots
sdpa, cache_write     ``Attention``, ``TensorScatter``
linear                ``MatMul`` by the transposed weight; a head tied to the embedding: ``Transpose`` of the one tensor
quant_linear          blocked ``DequantizeLinear`` of ``[I, O]`` int4/int8 (uint4/uint8 with zero points) + ``MatMul``; ONNX
                      Runtime recognises the pair and runs its MatMulNBits kernel
int8_linear           ``QuantizeLinear``, ``DequantizeLinear`` and ``MatMul`` (int8.py)
quant_embedding       ``Gather`` of packed bytes, taken apart with ``BitwiseAnd`` and ``BitShift``, times the gathered scales
rms_norm, rope        ``RMSNormalization``, ``RotaryEmbedding`` (opset 23)
moe                   none: the model's own batched formulation is traced
====================  ====================================================================================================

The embedding keeps its own copy of a tied head's codes: the head needs them transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from optkit.export.lower.contrib import DequantizedTable, typed
from optkit.export.lower.ort import OrtTable
from optkit.export.lower.recurrent_onnx import StandardStateTable


class OnnxTable(OrtTable):
    """The standard translations; inherits what ``ort`` already says in standard operators."""

    fused_experts = False

    def table(self) -> dict[Any, Callable[..., Any]]:
        table = super().table() | StandardStateTable(self.version).table()
        del table[torch.ops.optkit.moe.default]
        return table

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return typed(self.op.RMSNormalization(x, weight, axis=-1, epsilon=eps), x, x.shape)

    def rope(self, x: Any, cos_table: Any, sin_table: Any, position_ids: Any, interleaved: bool) -> Any:
        cos_table, sin_table = self.like(cos_table, x), self.like(sin_table, x)
        turned = 2 * cos_table.shape[1]
        extra = {} if turned == x.shape[3] else {"rotary_embedding_dim": turned}
        out = self.op.RotaryEmbedding(x, cos_table, sin_table, position_ids, interleaved=int(interleaved), **extra)
        return typed(out, x, x.shape)

    def linear(self, x: Any, weight: Any, bias: Any) -> Any:
        turned = typed(self.op.Transpose(weight, perm=[1, 0]), weight, [weight.shape[1], weight.shape[0]])
        out = typed(self.op.MatMul(x, turned), x, [*x.shape[:-1], weight.shape[0]])
        return out if bias is None else self.op.Add(out, bias)

    def quant_embedding(self, ids: Any, packed: Any, scale: Any, zero_point: Any, num_bits: int) -> Any:
        op = self.op
        rows = op.Gather(packed, ids, axis=0)  # [B, S, G, bytes] uint8
        if num_bits == 4:
            low = op.BitwiseAnd(rows, op.Constant(value=ir.tensor([15], dtype=ir.DataType.UINT8)))
            high = op.BitShift(rows, op.Constant(value=ir.tensor([4], dtype=ir.DataType.UINT8)), direction="RIGHT")
            pair = op.Concat(op.Unsqueeze(low, self.ints(-1)), op.Unsqueeze(high, self.ints(-1)), axis=-1)
            rows = op.Reshape(pair, self.ints(0, 0, packed.shape[1], packed.shape[2] * 2))
        codes = op.Cast(rows, to=int(scale.dtype))
        offset = op.CastLike(op.Constant(value_float=float(1 << (num_bits - 1))), scale)
        if zero_point is not None:
            zeros = op.Gather(zero_point, ids, axis=0)  # spread to [V, G] by passes.spread_zero_points
            offset = op.Unsqueeze(op.Cast(zeros, to=int(scale.dtype)), self.ints(-1))
        values = op.Mul(op.Sub(codes, offset), op.Unsqueeze(op.Gather(scale, ids, axis=0), self.ints(-1)))
        width = packed.shape[1] * packed.shape[2] * 8 // num_bits
        return typed(op.Reshape(values, self.ints(0, 0, width)), scale, [*ids.shape, width])

    def attention(
        self, q: Any, k: Any, v: Any, past_k: Any, past_v: Any, past_lens: Any, query_lens: Any, slots: Any, cos_table: Any,
        sin_table: Any, position_ids: Any, mask: Any, sinks: Any, scale: float, softcap: float, window: int, interleaved: bool,
        implicit: bool,
    ) -> Any:  # fmt: skip
        if cos_table is not None:
            q = self.rope(q, cos_table, sin_table, position_ids, interleaved)
            k = self.rope(k, cos_table, sin_table, position_ids, interleaved)
        present_k, keys = self.cache_write(past_k, k, past_lens, query_lens, slots)
        present_v, values = self.cache_write(past_v, v, past_lens, query_lens, slots)
        return self.sdpa(q, keys, values, mask, sinks, scale, softcap), present_k, present_v


class TensorRTTable(OnnxTable):
    """Target ``tensorrt``: the part of opset 24 that TensorRT's parser takes; see docs/tensorrt.md.

    Caches have a static length, so a write needs no slice; attention with a soft cap, sinks or in float32 is spelled out;
    weights are symmetric and signed.
    """

    def cache_write(self, past: Any, new: Any, past_lens: Any, query_lens: Any, slots: Any) -> Any:
        present = typed(self.op.TensorScatter(past, new, past_lens, axis=-2, mode="linear"), past, past.shape)
        return present, present

    def quant_embedding(self, ids: Any, packed: Any, scale: Any, zero_point: Any, num_bits: int) -> Any:
        """Rows of the dequantized table: TensorRT has neither uint8 nor a gather of 4-bit values."""
        width = packed.shape[1] * packed.shape[2] * 8 // num_bits
        table = typed(DequantizedTable(packed, scale, zero_point, bits=num_bits), scale, [packed.shape[0], width])
        return typed(self.op.Gather(table, ids, axis=0), scale, [*ids.shape, width])

    def sdpa(self, q: Any, k: Any, v: Any, mask: Any, sinks: Any, scale: float, softcap: float) -> Any:
        if sinks is None and softcap == 0 and q.dtype != ir.DataType.FLOAT:
            return super().sdpa(q, k, v, mask, None, scale, 0.0)
        heads = q.shape[1]
        out = self.spelled_out_attention(q, k, v, mask, sinks, scale, softcap)
        return self.flat(typed(out, v, [q.shape[0], heads, q.shape[2], v.shape[3]]))
