"""Target ``ort``: the operators of state_ops.py as com.microsoft ``LinearAttention`` and ``CausalConvWithState``.

Checked against the float64 formulas on ONNX Runtime's CPU provider (1.32): query and key heads that serve several state
heads, a decay per head and per key dimension, ``Dv`` = 1. ``present_state`` of the convolution is not used: it ends at the
last column, padded or not, while the state must end at each row's last valid token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from optkit.export.lower import contrib
from optkit.export.lower.contrib import opset, typed

LinearAttention = contrib.contrib(
    "LinearAttention", 6, 2, {"q_num_heads": "i", "kv_num_heads": "i", "scale": "f", "update_rule": "s", "chunk_size": "i"}
)
CausalConvWithState = contrib.contrib("CausalConvWithState", 4, 2, {"activation": "s", "ndim": "i"})


class StateTable:
    """The translations of recurrent layers; one instance per export."""

    def __init__(self, version: int) -> None:
        self.op = opset(version)

    def table(self) -> dict[Any, Callable[..., Any]]:
        names = ("linear_attention", "causal_conv")
        return {getattr(torch.ops.optkit, name).default: contrib.translation(getattr(self, name)) for name in names}

    def packed(self, x: Any) -> Any:
        """``[B, S, H, D]`` -> ``[B, S, H*D]``."""
        width = x.shape[2] * x.shape[3]
        return typed(self.op.Reshape(x, self.op.Constant(value_ints=[0, 0, width])), x, [x.shape[0], x.shape[1], width])

    def linear_attention(self, q: Any, k: Any, v: Any, decay: Any, beta: Any, state: Any, scale: float) -> Any:
        heads, size = v.shape[2], v.shape[3]
        out, final = LinearAttention(
            self.packed(q), self.packed(k), self.packed(v), state, self.packed(decay) if len(decay.shape) == 4 else decay, beta,
            q_num_heads=q.shape[2], kv_num_heads=heads, scale=scale, update_rule="gated" if beta is None else "gated_delta",
        )  # fmt: skip
        typed(out, v, [v.shape[0], v.shape[1], heads * size])
        out = typed(self.op.Reshape(out, self.op.Constant(value_ints=[0, 0, heads, size])), v, v.shape)
        return out, typed(final, state, state.shape)

    def causal_conv(self, x: Any, past: Any, weight: Any, bias: Any, silu: bool) -> Any:
        kernel = self.op.Unsqueeze(weight, self.op.Constant(value_ints=[1]))
        out, state = CausalConvWithState(x, kernel, bias, past, activation="silu" if silu else "none", ndim=1)
        typed(state, past, past.shape)
        return typed(out, x, x.shape)
