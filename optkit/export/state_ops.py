"""Fused operations of recurrent and convolutional layers, as torch custom ops with real CPU implementations (like ops.py).

Shapes: ``B`` batch, ``S`` new tokens, ``C`` channels, ``n`` taps, ``H`` state heads, ``Hq``/``Hk`` query and key heads (each
serves ``H / Hq`` consecutive state heads), ``D`` key size, ``Dv`` value size.

``causal_conv``: ``y[t] = act(bias + Σ_j weight[j] · x[t - (n - 1) + j])`` per channel, the past before ``x``.

``linear_attention``: ``S ← e^g S``; then ``S ← S + k vᵀ``, or with ``beta`` the delta rule ``S ← S + k (β (v - Sᵀk))ᵀ``; the
output is ``scale · Sᵀq``. That is Mamba-2 (arXiv:2405.21060: q = C, k = B, v = Δx, g = ΔA), Mamba-1 (arXiv:2312.00752: a head
per channel, Dv = 1, a decay per key dimension), and gated DeltaNet (arXiv:2412.06464).

A padded token must leave the state as it is: its ``g`` and ``k`` are zeroed by the caller, which is exact (``e^0 = 1``,
``k vᵀ = 0``).
Cost: ``O(S · H · D · Dv)``; the state is ``[B, H, D, Dv]`` float32 whatever the model's dtype, as in transformers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op


@custom_op("optkit::causal_conv", mutates_args=())
def causal_conv(x: Tensor, past: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """``x [B,C,S]``, ``past [B,C,n-1]``, ``weight [C,n]``, ``bias [C]`` -> ``[B,C,S]``."""
    out = F.conv1d(torch.cat([past, x], -1).to(weight.dtype), weight[:, None], bias, groups=weight.shape[0])
    return (F.silu(out) if silu else out).to(x.dtype)


@causal_conv.register_fake
def _(x: Tensor, past: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("optkit::linear_attention", mutates_args=())
def linear_attention(
    q: Tensor,  # [B, S, Hq, D]
    k: Tensor,  # [B, S, Hk, D]
    v: Tensor,  # [B, S, H, Dv]
    decay: Tensor,  # [B, S, H] or [B, S, H, D], log space
    beta: Tensor | None,  # [B, S, H]
    state: Tensor,  # [B, H, D, Dv]
    scale: float,
) -> tuple[Tensor, Tensor]:
    """All float32 -> ``[B, S, H, Dv]`` and the state after the last token."""
    heads, state, out = v.shape[2], state.clone(), torch.empty_like(v, memory_format=torch.contiguous_format)
    q, k = q.repeat_interleave(heads // q.shape[2], 2), k.repeat_interleave(heads // k.shape[2], 2)
    factor = (decay if decay.dim() == 4 else decay[..., None]).exp()  # [B, S, H, D or 1]
    for t in range(v.shape[1]):
        state = state * factor[:, t, ..., None]
        new = v[:, t]
        if beta is not None:
            new = beta[:, t, :, None] * (new - torch.einsum("bhde,bhd->bhe", state, k[:, t]))
        state = state + k[:, t, ..., None] * new[:, :, None]
        out[:, t] = scale * torch.einsum("bhde,bhd->bhe", state, q[:, t])
    return out, state


@linear_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v, memory_format=torch.contiguous_format), torch.empty_like(state)
