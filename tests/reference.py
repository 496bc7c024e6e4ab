"""Slow, obvious float64 numpy versions of what optkit computes, written from the formulas. Never imports optkit.

Shapes: ``S`` new tokens, ``T`` cached and new tokens, ``H`` heads, ``K`` key/value heads, ``D`` head size, ``C`` channels,
``O`` outputs, ``I`` inputs, ``G`` groups, ``V`` vocabulary. Loops over rows and heads are on purpose.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def f64(x: Any) -> Array:
    """``x`` (array or torch tensor) as a float64 array."""
    return np.asarray(x.detach().cpu().double().numpy() if hasattr(x, "detach") else x, dtype=np.float64)


# ------------------------------------------------------------------------------------------------ norms, activations


def rms_norm(x: Any, weight: Any, eps: float, offset: float = 0.0) -> Array:
    """``x / sqrt(mean(x²) + eps) · (offset + weight)`` over the last axis (arXiv:1910.07467); gemma has offset 1."""
    x = f64(x)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (offset + f64(weight))


def layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Array:
    """``(x - mean) / sqrt(var + eps) · weight + bias`` over the last axis, population variance (arXiv:1607.06450)."""
    x = f64(x)
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * f64(weight) + f64(bias)


def softcap(x: Any, cap: float) -> Array:
    """``cap · tanh(x / cap)``; a cap of 0 is none."""
    return cap * np.tanh(f64(x) / cap) if cap else f64(x)


def softmax(x: Any) -> Array:
    """Over the last axis; a row of ``-inf`` gives zeros, not NaN."""
    x = f64(x)
    top = x.max(-1, keepdims=True)
    powers = np.exp(x - np.where(np.isfinite(top), top, 0.0))
    total = powers.sum(-1, keepdims=True)
    return np.divide(powers, total, out=np.zeros_like(powers), where=total > 0)


def silu(x: Any) -> Array:
    x = f64(x)
    return x / (1 + np.exp(-x))


def softplus(x: Any) -> Array:
    return np.logaddexp(0.0, f64(x))


# ------------------------------------------------------------------------------------------------ rotary, attention


def rope_tables(length: int, rotary_dim: int, theta: float = 10000.0) -> tuple[Array, Array]:
    """``cos`` and ``sin`` ``[length, rotary_dim / 2]`` of ``position · theta^(-2i / rotary_dim)`` (arXiv:2104.09864)."""
    angles = np.outer(np.arange(length), theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim))
    return np.cos(angles), np.sin(angles)


def rotate(x: Any, cos: Any, sin: Any, interleaved: bool = False) -> Array:
    """Rotates the first ``2·cos.shape[-1]`` of ``x``'s last axis. Pairs are (i, i + R/2), or (2i, 2i + 1) if interleaved."""
    x, cos, sin = f64(x).copy(), f64(cos), f64(sin)
    half = cos.shape[-1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first], x[..., second] = a * cos - b * sin, b * cos + a * sin
    return x


def visible(query: int, key: int, window: int | None = None, chunk: int | None = None) -> bool:
    """May the token at position ``query`` look at ``key``? A window counts the current token; chunks do not overlap."""
    if key > query or (window and key <= query - window):
        return False
    return not chunk or key // chunk == query // chunk


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    first_position: int = 0,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    cap: float = 0.0,
    sinks: Any = None,
    slopes: Any = None,
) -> Array:
    """One row's causal attention.

    Args:
        q: ``[H, S, D]``, of the tokens at ``first_position ..``.
        k, v: ``[K, T, D]``, of positions 0 ..; query head ``h`` uses key head ``h // (H / K)``.
        scale: default ``1 / sqrt(D)``.
        sinks: ``[H]``; ``exp(sink)`` joins the softmax's denominator only.
        slopes: ``[H]``; ``slope · key position`` is added to the scores (ALiBi, arXiv:2108.12409).

    Returns:
        ``[H, S, Dv]``.
    """
    q, k, v = f64(q), f64(k), f64(v)
    heads, new, size = q.shape
    scale = 1 / math.sqrt(size) if scale is None else scale
    out = np.zeros((heads, new, v.shape[-1]))
    for h in range(heads):
        keys, values = k[h * len(k) // heads], v[h * len(v) // heads]
        for s in range(new):
            position = first_position + s
            seen = [t for t in range(len(keys)) if visible(position, t, window, chunk)]
            scores = softcap(keys[seen] @ q[h, s] * scale, cap)
            if slopes is not None:
                scores = scores + f64(slopes)[h] * np.array(seen)
            extra = [] if sinks is None else [f64(sinks)[h]]
            out[h, s] = softmax(np.concatenate([scores, extra]))[: len(seen)] @ values[seen]
    return out


# ------------------------------------------------------------------------------------------------ recurrent layers


def causal_conv(x: Any, weight: Any, bias: Any = None, past: Any = None) -> tuple[Array, Array]:
    """One row's depthwise convolution ``y[c, t] = bias[c] + Σ_j weight[c, j] · x[c, t - (n - 1) + j]``, n taps.

    Args:
        x: ``[C, S]``.
        weight: ``[C, n]``.
        past: ``[C, n - 1]``, the inputs before ``x`` (zeros at the start).

    Returns:
        ``y [C, S]`` and the new past.
    """
    x, weight = f64(x), f64(weight)
    taps = weight.shape[1]
    full = np.concatenate([np.zeros((len(x), taps - 1)) if past is None else f64(past), x], 1)
    y = np.stack([(full[:, t : t + taps] * weight).sum(1) for t in range(x.shape[1])], 1)
    return y + (0.0 if bias is None else f64(bias)[:, None]), full[:, full.shape[1] - (taps - 1) :]


def linear_attention(
    q: Any, k: Any, v: Any, decay: Any, beta: Any = None, state: Any = None, scale: float = 1.0
) -> tuple[Array, Array]:
    """One head's recurrence ``S ← e^g S``, ``S ← S + k (v or β(v - Sᵀk))ᵀ``, ``o = scale · Sᵀq``.

    Without ``beta`` it is the selective state space of Mamba-2 (arXiv:2405.21060: q = C, k = B, v = Δx, g = ΔA), with it the
    gated delta rule (arXiv:2412.06464).

    Args:
        q, k: ``[S, D]``; v: ``[S, Dv]``; decay: ``[S]`` or ``[S, D]``, log space; beta: ``[S]``; state: ``[D, Dv]``.

    Returns:
        ``[S, Dv]`` and the state after the last token.
    """
    q, k, v, decay = f64(q), f64(k), f64(v), f64(decay)
    state = np.zeros((k.shape[1], v.shape[1])) if state is None else f64(state).copy()
    out = np.zeros((len(q), v.shape[1]))
    for t in range(len(q)):
        state *= np.exp(decay[t])[:, None] if decay.ndim == 2 else np.exp(decay[t])
        new = v[t] if beta is None else f64(beta)[t] * (v[t] - state.T @ k[t])
        state += np.outer(k[t], new)
        out[t] = scale * state.T @ q[t]
    return out, state


# ------------------------------------------------------------------------------------------------ quantization


def quantize(x: Any, scale: Any, zero_point: Any, low: int, high: int) -> Array:
    """``clip(round_half_even(x / scale) + zero_point, low, high)``; a scale of 0 gives the zero point."""
    x, scale = f64(x), f64(scale)
    steps = np.divide(x, scale, out=np.zeros(np.broadcast(x, scale).shape), where=scale != 0)
    return np.clip(np.rint(steps) + f64(zero_point), low, high)


def dequantize(q: Any, scale: Any, zero_point: Any) -> Array:
    """``(q - zero_point) · scale``."""
    return (f64(q) - f64(zero_point)) * f64(scale)


def quantize_groups(
    weight: Any, num_bits: int, group_size: int | None = None, symmetric: bool = True
) -> tuple[Array, Array, Array]:
    """Round to nearest with each group's range as it is: ``q [O, I]``, ``scale [O, G]``, ``zero_point [O, G]``.

    Symmetric: the largest magnitude maps to ``2^(bits-1) - 1`` of the signed grid. Asymmetric: ``[min(x, 0), max(x, 0)]`` to
    the signed grid's ends.
    """
    weight = f64(weight)
    size = weight.shape[1] if group_size is None else group_size
    low, high = -(2 ** (num_bits - 1)), 2 ** (num_bits - 1) - 1
    groups = weight.reshape(len(weight), -1, size)
    if symmetric:
        scale = np.abs(groups).max(-1) / high
        zero = np.zeros_like(scale)
    else:
        least, most = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scale = (most - least) / (high - low)
        zero = np.clip(np.rint(low - np.divide(least, scale, out=np.zeros_like(scale), where=scale != 0)), low, high)
    q = quantize(groups, scale[..., None], zero[..., None], low, high)
    return q.reshape(weight.shape), scale, zero


# ------------------------------------------------------------------------------------------------ metrics


def log_softmax(x: Any) -> Array:
    x = f64(x)
    top = x.max(-1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))


def kl_divergence(reference: Any, candidate: Any) -> Array:
    """``Σ p (log p - log q)`` in nats over the last axis of two logit arrays."""
    p, q = log_softmax(reference), log_softmax(candidate)
    return (np.exp(p) * (p - q)).sum(-1)


def perplexity(logits: Any, targets: Any) -> float:
    """``exp(mean negative log-likelihood)``; ``logits [N, V]`` of the tokens ``targets [N]``."""
    logs = log_softmax(logits)
    return float(np.exp(-np.mean([logs[i, t] for i, t in enumerate(np.asarray(targets))])))


def sqnr_db(signal: Any, approximation: Any) -> float:
    """``10 log10(Σ x² / Σ (x - y)²)``, infinite for an exact copy."""
    signal, error = f64(signal), f64(signal) - f64(approximation)
    noise = float((error**2).sum())
    return float("inf") if noise == 0 else 10 * math.log10(float((signal**2).sum()) / noise)
