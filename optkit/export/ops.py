"""The fused operations the exporter captures, as torch custom ops with real CPU implementations.

Because every op computes, the captured program can be run in torch and compared with the model before it is lowered, and
the written file can be compared with the captured program. Each target's table (``lower/``) says what an op becomes.

Shapes: ``B`` batch, ``S`` new tokens, ``T`` visible slots, ``P`` cache capacity, ``H`` query heads, ``K`` key/value heads,
    ``D`` head size,
``R`` rotated dimensions. Sequences are right padded and a token's position is its slot, so everything about where tokens are is
two vectors: ``past_lens [B]`` and ``query_lens [B]`` (int64).

``rope``         RoFormer (arXiv:2104.09864) over the first R of D dimensions, tables ``[positions, R/2]``; arithmetic as ONNX
                 ``RotaryEmbedding``.
``attention``    softmax(scale·q·kᵀ, capped, masked)·v over an in-place cache; optional rotary; sinks add ``exp(sink)`` to the
                 denominator.
``moe``          ``Σ_j weight_j · W2[e_j] · act(W1[e_j] x)`` with ``act`` the gated unit ``gate·σ(alpha·gate)·(up + beta)``,
                 clamped to ``limit``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from optkit.checkpoint.affine import fake_quantize_inputs
from optkit.checkpoint.quant_linear import dequantize_packed


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """``x [B, H, S, D]``, ``cos``/``sin [B, S, R/2]``: rotates the first R of D."""
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        out = torch.cat((a * c - b * s, b * c + a * s), -1)
    return torch.cat((out, rest), -1)


def scatter_rows(past: Tensor, new: Tensor, past_lens: Tensor, query_lens: Tensor) -> Tensor:
    """A copy of ``past [B, K, P, D]`` with row ``b``'s first ``query_lens[b]`` new entries at slot ``past_lens[b]``."""
    out = past.clone()
    for row, (start, count) in enumerate(zip(past_lens.tolist(), query_lens.tolist(), strict=True)):
        out[row, :, start : start + count] = new[row, :, :count]
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, scale: float, softcap: float) -> Tensor:
    """``q [B,H,S,D]``, ``k [B,K,T,D]``, ``v [B,K,T,Dv]``, ``mask`` bool or additive ``[B|1, H|1, S, T]`` -> ``[B, S,
    H*Dv]``."""
    heads, repeat = q.shape[1], q.shape[1] // k.shape[1]
    scores = q.float() @ k.repeat_interleave(repeat, 1).float().transpose(2, 3) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        column = sinks.float().view(1, heads, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    out = weights.nan_to_num(0.0) @ v.repeat_interleave(repeat, 1).float()
    return out.to(v.dtype).transpose(1, 2).flatten(2).contiguous()


@custom_op("optkit::slot_past", mutates_args=())
def slot_past(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """``past_lens [B]`` of the ``slots`` layout: 0 for a first prompt (S == T), else the valid length less S."""
    new, total = input_ids.shape[1], attention_mask.shape[1]
    valid = attention_mask.sum(1)
    return torch.zeros_like(valid) if new == total else valid - new


@slot_past.register_fake
def _(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    return input_ids.new_empty((input_ids.shape[0],), dtype=torch.int64)


@custom_op("optkit::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h * weight.float()).to(x.dtype)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("optkit::rope", mutates_args=())
def rope(x: Tensor, cos_table: Tensor, sin_table: Tensor, position_ids: Tensor, interleaved: bool) -> Tensor:
    return rotate(x, cos_table[position_ids], sin_table[position_ids], interleaved).contiguous()


@rope.register_fake
def _(x: Tensor, cos_table: Tensor, sin_table: Tensor, position_ids: Tensor, interleaved: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("optkit::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``weight [O, I]``; kept whole so that the lowering writes it the way the target multiplies."""
    return F.linear(x, weight, bias)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@custom_op("optkit::quant_linear", mutates_args=())
def quant_linear(
    x: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, num_bits: int
) -> Tensor:
    """``packed [O, G, bytes]``, ``scale [O, G]``, ``zero_point [O, bytes]`` (checkpoint/quant_linear.py)."""
    return F.linear(x, dequantize_packed(packed, scale, zero_point, num_bits).to(x.dtype), bias)


@quant_linear.register_fake
def _(x: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, num_bits: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


@custom_op("optkit::int8_linear", mutates_args=())
def int8_linear(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, input_scale: Tensor | None, rounds: bool
) -> Tensor:
    """w8a8: ``packed [O, 1, I]``, ``scale [O, 1]``; ``x`` is rounded to int8 first, by ``input_scale`` or by token.

    ``rounds`` = False leaves the rounding out: what is left can be compared to the last digit, while a difference in the last
    digit before rounding is a whole step after it.
    """
    x = fake_quantize_inputs(x, input_scale) if rounds else x
    return F.linear(x, dequantize_packed(packed, scale, None, 8).to(x.dtype), bias)


@int8_linear.register_fake
def _(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, input_scale: Tensor | None, rounds: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


@custom_op("optkit::quant_embedding", mutates_args=())
def quant_embedding(ids: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, num_bits: int) -> Tensor:
    flat = ids.reshape(-1)
    zeros = None if zero_point is None else zero_point[flat]
    rows = dequantize_packed(packed[flat], scale[flat], zeros, num_bits)
    return rows.to(scale.dtype).reshape(*ids.shape, -1)


@quant_embedding.register_fake
def _(ids: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, num_bits: int) -> Tensor:
    return scale.new_empty((*ids.shape, packed.shape[1] * packed.shape[2] * 8 // num_bits))


@custom_op("optkit::attention", mutates_args=())
def attention(
    q: Tensor,  # [B, H, S, D]
    k: Tensor,  # [B, K, S, D]
    v: Tensor,  # [B, K, S, D]
    past_k: Tensor,  # [B, K, P, D]
    past_v: Tensor,  # [B, K, P, D]
    past_lens: Tensor,  # [B] int64
    query_lens: Tensor,  # [B] int64
    slots: Tensor,  # any tensor whose axis 1 is T
    cos_table: Tensor | None,
    sin_table: Tensor | None,
    position_ids: Tensor,  # [B, S]
    mask: Tensor,  # [B|1, H|1, S, T] bool or additive
    sinks: Tensor | None,  # [H]
    scale: float,
    softcap: float,
    window: int,  # 0: none
    interleaved: bool,
    implicit: bool,  # the mask is exactly causal (and windowed) over the valid slots
) -> tuple[Tensor, Tensor, Tensor]:
    if cos_table is not None and sin_table is not None:
        q = rotate(q, cos_table[position_ids], sin_table[position_ids], interleaved)
        k = rotate(k, cos_table[position_ids], sin_table[position_ids], interleaved)
    keys, values = scatter_rows(past_k, k, past_lens, query_lens), scatter_rows(past_v, v, past_lens, query_lens)
    visible = slots.shape[1]
    out = attend(q, keys[:, :, :visible], values[:, :, :visible], mask, sinks, scale, softcap)
    return out, keys, values


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    out = q.new_empty((q.shape[0], q.shape[2], q.shape[1] * v.shape[-1]))
    return out, torch.empty_like(past_k), torch.empty_like(past_v)


@custom_op("optkit::sdpa", mutates_args=())
def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, scale: float, softcap: float) -> Tensor:
    return attend(q, k, v, mask, sinks, scale, softcap)


@sdpa.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, scale: float, softcap: float) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1] * v.shape[-1]))


@custom_op("optkit::cache_write", mutates_args=())
def cache_write(past: Tensor, new: Tensor, past_lens: Tensor, query_lens: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """``past [B,K,P,D]``, ``new [B,K,S,D]`` -> ``present [B,K,P,D]`` and its first T slots. Slots past a row's valid
    ones are undefined."""
    present = scatter_rows(past, new, past_lens, query_lens)
    return present, present[:, :, : slots.shape[1]].clone()


@cache_write.register_fake
def _(past: Tensor, new: Tensor, past_lens: Tensor, query_lens: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    visible = past.new_empty((past.shape[0], past.shape[1], slots.shape[1], past.shape[3]))
    return torch.empty_like(past), visible


@custom_op("optkit::take_positions", mutates_args=())
def take_positions(hidden: Tensor, positions: Tensor, query_lens: Tensor) -> Tensor:
    """``hidden [B,S,E]``, ``positions [N]`` (negative: from the row's last valid token) -> ``[B, N, E]``."""
    index = torch.where(positions < 0, positions + query_lens[:, None], positions + 0 * query_lens[:, None])
    index = index.clamp(0, hidden.shape[1] - 1)
    return hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[-1]))


@take_positions.register_fake
def _(hidden: Tensor, positions: Tensor, query_lens: Tensor) -> Tensor:
    return hidden.new_empty((hidden.shape[0], positions.shape[0], hidden.shape[2]))


@custom_op("optkit::moe", mutates_args=())
def moe(
    x: Tensor,  # [N, E]
    index: Tensor,  # [N, k] int64
    weight: Tensor,  # [N, k]
    fc1: Tensor,  # [X, 2*I, E] rows interleaved gate, up; or uint8 [X, 2*I, G, bytes]
    fc1_scale: Tensor | None,  # [X, 2*I, G]
    fc1_bias: Tensor | None,  # [X, 2*I]
    fc2: Tensor,  # [X, E, I] or uint8 [X, E, G, bytes]
    fc2_scale: Tensor | None,
    fc2_bias: Tensor | None,  # [X, E]
    alpha: float,
    beta: float,
    limit: float,
    num_bits: int,
) -> Tensor:
    w1, w2 = dense_experts(fc1, fc1_scale, num_bits), dense_experts(fc2, fc2_scale, num_bits)
    out = torch.zeros_like(x)
    for slot in range(index.shape[1]):
        expert = index[:, slot]
        y = torch.einsum("ne,noe->no", x, w1[expert].to(x.dtype))
        y = y if fc1_bias is None else y + fc1_bias[expert]
        gate, up = y[:, 0::2], y[:, 1::2]
        if limit > 0:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        y = torch.einsum("ni,nei->ne", gate * torch.sigmoid(alpha * gate) * (up + beta), w2[expert].to(x.dtype))
        y = y if fc2_bias is None else y + fc2_bias[expert]
        out = out + weight[:, slot : slot + 1].to(x.dtype) * y
    return out


@moe.register_fake
def _(x: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(x)


def dense_experts(weight: Tensor, scale: Tensor | None, num_bits: int) -> Tensor:
    """``[X, O, I]`` float from packed experts (``scale`` given) or as it is."""
    if scale is None:
        return weight
    flat = dequantize_packed(weight.flatten(0, 1), scale.flatten(0, 1), None, num_bits)
    return flat.unflatten(0, weight.shape[:2])
