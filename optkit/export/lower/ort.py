"""Target ``ort``: the fused operators of ONNX Runtime (com.microsoft), CPU and CUDA.

====================  ====================================================================================================
attention             GroupQueryAttention: causal and windowed masks are attributes, anything else an additive bias; rotary
    inside
sdpa                  ONNX ``Attention`` (opset 23)
cache_write           ``TensorScatter`` (opset 24) at the rows' past lengths
linear                ``MatMul`` by the transposed weight; a head tied to the embedding ``FusedMatMul(transB)`` on the one
                      tensor
quant_linear          ``MatMulNBits``
int8_linear           ``QuantizeLinear``, ``DequantizeLinear`` and ``MatMul``, which become integer products (int8.py)
quant_embedding       ``GatherBlockQuantized`` on the very tensors of the tied head
rms_norm              ``SimplifiedLayerNormalization``, with the residual add ``SkipSimplifiedLayerNormalization`` (passes.py)
rope                  com.microsoft ``RotaryEmbedding``
moe                   ``MoE`` / ``QMoE``
====================  ====================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from optkit.export.lower import contrib, int8, recurrent_ort
from optkit.export.lower.contrib import opset, typed

OPSET = 24


class OrtTable:
    """The translations; one instance per export.

    ``fused_experts``: the target has an operator for a mixture of experts.

    Args:
        version: ONNX opset.
        layout: of io_spec.LAYOUTS.
        accuracy_level: of MatMulNBits and QMoE.
    """

    fused_experts = True

    def __init__(self, version: int, layout: str, accuracy_level: int) -> None:
        self.op, self.version, self.layout, self.accuracy_level = opset(version), version, layout, accuracy_level

    def table(self) -> dict[Any, Callable[..., Any]]:
        names = [
            "slot_past",
            "rms_norm",
            "rope",
            "linear",
            "quant_linear",
            "int8_linear",
            "quant_embedding",
            "attention",
            "sdpa",
            "cache_write",
            "take_positions",
            "moe",
        ]
        ours = {getattr(torch.ops.optkit, name).default: contrib.translation(getattr(self, name)) for name in names}
        return {**ours, **recurrent_ort.StateTable(self.version).table()}

    def ints(self, *values: int) -> Any:
        return self.op.Constant(value_ints=list(values))

    def slot_past(self, input_ids: Any, attention_mask: Any) -> Any:
        op = self.op
        new, total = op.Shape(input_ids, start=1, end=2), op.Shape(attention_mask, start=1, end=2)
        valid = op.ReduceSum(attention_mask, self.ints(1), keepdims=0)
        return op.Where(op.Equal(new, total), op.Mul(valid, self.ints(0)), op.Sub(valid, new))

    def take_positions(self, hidden: Any, positions: Any, query_lens: Any) -> Any:
        op = self.op
        lens = op.Unsqueeze(query_lens, self.ints(1))
        index = op.Where(
            op.Less(positions, self.ints(0)), op.Add(positions, lens), op.Add(positions, op.Mul(lens, self.ints(0)))
        )
        last = op.Sub(op.Shape(hidden, start=1, end=2), self.ints(1))
        index = op.Max(op.Min(index, last), self.ints(0))
        return op.GatherND(hidden, op.Unsqueeze(index, self.ints(2)), batch_dims=1)

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return typed(contrib.SimplifiedLayerNormalization(x, weight, axis=-1, epsilon=eps, stash_type=1), x, x.shape)

    def like(self, table: Any, x: Any) -> Any:
        """A rotary table in the type of what it turns (some models turn in float32)."""
        return table if table.dtype == x.dtype else typed(self.op.Cast(table, to=int(x.dtype)), x, table.shape)

    def rope(self, x: Any, cos_table: Any, sin_table: Any, position_ids: Any, interleaved: bool) -> Any:
        cos_table, sin_table = self.like(cos_table, x), self.like(sin_table, x)
        extra = {}
        if 2 * cos_table.shape[1] != x.shape[3]:
            extra = {"rotary_embedding_dim": 2 * cos_table.shape[1], "num_heads": x.shape[1]}
        out = contrib.RotaryEmbedding(x, position_ids, cos_table, sin_table, interleaved=int(interleaved), **extra)
        return typed(out, x, x.shape)

    def linear(self, x: Any, weight: Any, bias: Any) -> Any:
        """Written as com.microsoft ``FusedMatMul(transB)`` first; passes.transpose_linears makes it a ``MatMul`` where
        nobody shares W."""
        out = contrib.FusedMatMul(x, weight, transB=1, transA=0, alpha=1.0)
        typed(out, x, [*x.shape[:-1], weight.shape[0]])
        return out if bias is None else self.op.Add(out, bias)

    def quant_linear(self, x: Any, packed: Any, scale: Any, zero_point: Any, bias: Any, num_bits: int) -> Any:
        rows, groups, width = packed.shape
        group = width * 8 // num_bits
        out = contrib.MatMulNBits(
            x,
            packed,
            scale,
            zero_point,
            None,
            bias,
            K=groups * group,
            N=rows,
            bits=num_bits,
            block_size=group,
            accuracy_level=self.accuracy_level,
        )
        return typed(out, x, [*x.shape[:-1], rows])

    def int8_linear(self, x: Any, packed: Any, scale: Any, bias: Any, input_scale: Any, rounds: bool) -> Any:
        """Written as ``Int8Linear``; int8.expand_linears takes it apart."""
        out = int8.Int8Linear(x, packed, scale, bias, input_scale)
        return typed(out, x, [*x.shape[:-1], packed.shape[0]])

    def quant_embedding(self, ids: Any, packed: Any, scale: Any, zero_point: Any, num_bits: int) -> Any:
        op = self.op
        group = packed.shape[2] * 8 // num_bits
        scales = op.Unsqueeze(scale, self.ints(2))
        rows = contrib.GatherBlockQuantized(
            packed, ids, scales, zero_point, bits=num_bits, block_size=group, quantize_axis=2, gather_axis=0
        )  # zero points: passes.spread_zero_points
        typed(rows, scale, [*ids.shape, packed.shape[1], group])
        return op.Reshape(rows, self.ints(0, 0, packed.shape[1] * group))

    def flat(self, x: Any) -> Any:
        """``[B,H,S,D]`` -> ``[B,S,H*D]``; cancels against the model's own split and transpose."""
        batch, heads, new, size = x.shape
        turned = typed(self.op.Transpose(x, perm=[0, 2, 1, 3]), x, [batch, new, heads, size])
        return typed(self.op.Reshape(turned, self.ints(0, 0, heads * size)), x, [batch, new, heads * size])

    def additive(self, mask: Any, like: Any) -> Any:
        """A bool mask as an additive bias of ``like``'s dtype, clamped to what the dtype can hold."""
        if mask.dtype != ir.DataType.BOOL:
            return mask
        low = -65504.0 if like.dtype == ir.DataType.FLOAT16 else -3.0e38
        zero, blocked = (self.op.Cast(self.op.Constant(value_float=v), to=int(like.dtype)) for v in (0.0, low))
        return typed(self.op.Where(mask, zero, blocked), like, mask.shape)

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        past_k: Any,
        past_v: Any,
        past_lens: Any,
        query_lens: Any,
        slots: Any,
        cos_table: Any,
        sin_table: Any,
        position_ids: Any,
        mask: Any,
        sinks: Any,
        scale: float,
        softcap: float,
        window: int,
        interleaved: bool,
        implicit: bool,
    ) -> Any:
        op, heads, groups = self.op, q.shape[1], k.shape[1]
        if cos_table is not None and (cos_table.shape[1] % 8 or q.shape[3] % 16):  # a limit of the kernel's rotary
            q, k = (
                self.rope(q, cos_table, sin_table, position_ids, interleaved),
                self.rope(k, cos_table, sin_table, position_ids, interleaved),
            )
            cos_table = sin_table = None
        last = op.Sub(op.Add(past_lens, query_lens), self.ints(1))
        if self.layout == "chunks":  # a row that is empty and stays so; the kernel wants an index
            last = op.Max(last, self.ints(0))
        seqlens = op.Cast(last, to=int(ir.DataType.INT32))
        total = op.Squeeze(op.Cast(op.Shape(slots, start=1, end=2), to=int(ir.DataType.INT32)))
        counts = op.Cast(query_lens, to=int(ir.DataType.INT32)) if self.layout == "chunks" else None
        bias = None if implicit else self.additive(mask, q)
        out, present_k, present_v = contrib.GroupQueryAttention(
            self.flat(q),
            self.flat(k),
            self.flat(v),
            past_k,
            past_v,
            seqlens,
            total,
            cos_table,
            sin_table,
            None,
            bias,
            sinks,
            None,
            None,
            None,
            None,
            counts,
            num_heads=heads,
            kv_num_heads=groups,
            scale=scale,
            softcap=softcap,
            do_rotary=int(cos_table is not None),
            rotary_interleaved=int(interleaved),
            local_window_size=window if implicit and window > 0 else -1,
        )
        typed(out, v, [q.shape[0], q.shape[2], heads * v.shape[3]])
        return out, typed(present_k, past_k, past_k.shape), typed(present_v, past_v, past_v.shape)

    def sdpa(self, q: Any, k: Any, v: Any, mask: Any, sinks: Any, scale: float, softcap: float) -> Any:
        op, heads = self.op, q.shape[1]
        if sinks is not None:
            out = self.spelled_out_attention(q, k, v, mask, sinks, scale, softcap)
        else:
            out, *_ = op.Attention(q, k, v, mask, scale=scale, softcap=softcap, is_causal=0)
        typed(out, v, [q.shape[0], heads, q.shape[2], v.shape[3]])
        return self.flat(out)

    def repeat_heads(self, x: Any, heads: int) -> Any:
        """``[B,K,T,D]`` -> ``[B,H,T,D]``."""
        op, repeat = self.op, heads // x.shape[1]
        if repeat == 1:
            return x
        tiled = op.Expand(op.Unsqueeze(x, self.ints(2)), self.ints(1, 1, repeat, 1, 1))
        return typed(op.Reshape(tiled, self.ints(0, heads, -1, x.shape[3])), x, [x.shape[0], heads, x.shape[2], x.shape[3]])

    def spelled_out_attention(self, q: Any, k: Any, v: Any, mask: Any, sinks: Any, scale: float, softcap: float) -> Any:
        """Attention in elementary operators. A sink is one more column of scores whose value is zero; ``Attention`` has
        no place for it."""
        op, heads = self.op, q.shape[1]
        scores = op.MatMul(q, op.Transpose(self.repeat_heads(k, heads), perm=[0, 1, 3, 2]))
        scores = op.Mul(scores, op.CastLike(op.Constant(value_float=scale), q))
        if softcap > 0:
            cap = op.CastLike(op.Constant(value_float=softcap), q)
            scores = op.Mul(op.Tanh(op.Div(scores, cap)), cap)
        scores = scores if mask is None else op.Add(scores, self.additive(mask, q))
        if sinks is None:
            return op.MatMul(op.Softmax(scores, axis=-1), self.repeat_heads(v, heads))
        sizes = op.Concat(op.Shape(q, start=0, end=3), self.ints(1), axis=0)
        column = op.Expand(op.Reshape(sinks, self.ints(1, heads, 1, 1)), sizes)
        weights = op.Softmax(op.Concat(scores, op.CastLike(column, q), axis=-1), axis=-1)
        weights = op.Slice(weights, self.ints(0), self.ints(-1), self.ints(-1))
        return op.MatMul(weights, self.repeat_heads(v, heads))

    def cache_write(self, past: Any, new: Any, past_lens: Any, query_lens: Any, slots: Any) -> Any:
        op = self.op
        present = typed(op.TensorScatter(past, new, past_lens, axis=-2), past, past.shape)
        total = op.Shape(slots, start=1, end=2)
        visible = op.Slice(present, self.ints(0), total, self.ints(2))
        return present, typed(visible, past, [past.shape[0], past.shape[1], slots.shape[1], past.shape[3]])

    def moe(
        self,
        x: Any,
        index: Any,
        weight: Any,
        fc1: Any,
        fc1_scale: Any,
        fc1_bias: Any,
        fc2: Any,
        fc2_scale: Any,
        fc2_bias: Any,
        alpha: float,
        beta: float,
        limit: float,
        num_bits: int,
    ) -> Any:
        """ORT's MoE routes by itself from logits; the model's own routing is given to it as logits that reproduce it
        exactly."""
        op, experts = self.op, fc1.shape[0]
        shape = op.Concat(op.Shape(index, start=0, end=1), self.ints(experts), axis=0)
        weight = op.Cast(weight, to=int(x.dtype))

        def fill(value: float) -> Any:
            return op.Expand(op.CastLike(op.Constant(value_float=value), weight), shape)

        common: dict[str, Any] = {
            "k": index.shape[1],
            "activation_type": "swiglu",
            "swiglu_fusion": 1,
            "activation_alpha": alpha,
            "activation_beta": beta,
        }
        if limit > 0:
            common["swiglu_limit"] = limit
        if not num_bits:
            logits = op.ScatterElements(fill(-1e4), index, op.Log(weight), axis=1)
            out = contrib.MoE(x, logits, fc1, fc1_bias, fc2, fc2_bias, normalize_routing_weights=1, **common)
            out = op.Mul(typed(out, x, x.shape), op.ReduceSum(weight, self.ints(1), keepdims=1))
            return typed(out, x, x.shape)
        chosen = op.ScatterElements(
            fill(0.0), index, op.Expand(op.CastLike(op.Constant(value_float=1.0), weight), op.Shape(index)), axis=1
        )
        dense = op.ScatterElements(fill(0.0), index, weight, axis=1)
        if num_bits == 4:
            common["accuracy_level"] = min(self.accuracy_level, 1)
        out = contrib.QMoE(
            x,
            chosen,
            fc1,
            fc1_scale,
            fc1_bias,
            fc2,
            fc2_scale,
            fc2_bias,
            None,
            None,
            None,
            None,
            None,
            None,
            dense,
            normalize_routing_weights=0,
            expert_weight_bits=num_bits,
            block_size=fc1.shape[3] * 8 // num_bits,
            **common,
        )
        return typed(out, x, x.shape)
