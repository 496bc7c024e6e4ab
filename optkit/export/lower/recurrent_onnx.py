"""The operators of state_ops.py in standard ONNX (opset 24): a ``Scan`` over the tokens, and ``Conv``.

The standard's own LinearAttention and CausalConvWithState come with opset 27. ``Scan`` says the recurrence as it is written in
the papers: state in, one token's q, k, v, decay (and beta) in, state and output out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch.onnx._internal.exporter._torchlib.ops.hop import call_op

from optkit.export.lower import contrib
from optkit.export.lower.contrib import opset, typed

_BODIES = itertools.count()  # names inside a body must differ from all names outside


class StandardStateTable:
    """The translations of recurrent layers; one instance per export."""

    def __init__(self, version: int) -> None:
        self.op, self.version = opset(version), version

    def table(self) -> dict[Any, Callable[..., Any]]:
        names = ("linear_attention", "causal_conv")
        return {getattr(torch.ops.optkit, name).default: contrib.translation(getattr(self, name)) for name in names}

    def ints(self, *values: int) -> Any:
        return self.op.Constant(value_ints=list(values))

    def by_state_head(self, x: Any, heads: int) -> Any:
        """``[B, S, Hq, D]`` -> ``[B, S, H, 1, D]``: every query or key head repeated for the state heads it serves."""
        op, groups, size = self.op, x.shape[2], x.shape[3]
        if groups == heads:
            return op.Unsqueeze(x, self.ints(3))
        tiled = op.Expand(op.Unsqueeze(x, self.ints(3)), self.ints(1, 1, 1, heads // groups, 1))
        return op.Reshape(tiled, self.ints(0, 0, heads, 1, size))

    def linear_attention(self, q: Any, k: Any, v: Any, decay: Any, beta: Any, state: Any, scale: float) -> Any:
        op, heads, size = self.op, v.shape[2], v.shape[3]
        factor = op.Exp(decay)  # [B, S, H] or [B, S, H, D]
        per_token = [
            op.Mul(self.by_state_head(q, heads), op.Constant(value_float=scale)),
            self.by_state_head(k, heads),
            op.Unsqueeze(v, self.ints(3)),
            op.Unsqueeze(factor, self.ints(4) if len(decay.shape) == 4 else self.ints(3, 4)),
        ]
        if beta is not None:
            per_token.append(op.Unsqueeze(beta, self.ints(3, 4)))
        by_token = [op.Transpose(x, perm=[1, 0, 2, 3, 4]) for x in per_token]  # axis 0: all that every runtime scans along
        final, out = call_op(
            "Scan", state, *by_token, _num_outputs=2, body=_body(len(by_token), self.version), num_scan_inputs=len(by_token)
        )
        typed(final, state, state.shape)
        typed(out, v, [v.shape[1], v.shape[0], heads, 1, size])
        out = op.Transpose(op.Squeeze(out, self.ints(3)), perm=[1, 0, 2, 3])
        return typed(out, v, v.shape), final

    def causal_conv(self, x: Any, past: Any, weight: Any, bias: Any, silu: bool) -> Any:
        op = self.op
        out = op.Conv(op.Concat(past, x, axis=2), op.Unsqueeze(weight, self.ints(1)), bias, group=weight.shape[0])
        out = op.Mul(out, op.Sigmoid(out)) if silu else out
        return typed(out, x, x.shape)


def _body(count: int, version: int) -> ir.Graph:
    """A token: ``state [B,H,D,Dv]``, ``q``/``k [B,H,1,D]``, ``v [B,H,1,Dv]``, ``factor [B,H,D|1,1]``, ``beta [B,H,1,1]``."""
    prefix = f"scan{next(_BODIES)}"
    names = ("state", "q", "k", "v", "factor", "beta")[: count + 1]
    inputs = [ir.Value(name=f"{prefix}_{name}", type=ir.TensorType(ir.DataType.FLOAT)) for name in names]
    nodes: list[ir.Node] = []

    def emit(op_type: str, values: Sequence[ir.Value], attributes: dict[str, Any] | None = None) -> ir.Value:
        node = ir.node(op_type, values, attributes, version=version)
        node.outputs[0].name = f"{prefix}_{len(nodes)}"
        node.outputs[0].dtype = ir.DataType.FLOAT
        nodes.append(node)
        return node.outputs[0]

    state, q, k, v, factor = inputs[:5]
    state = emit("Mul", [state, factor])
    if count == 5:
        v = emit("Mul", [inputs[5], emit("Sub", [v, emit("MatMul", [k, state])])])
    state = emit("Add", [state, emit("Mul", [emit("Transpose", [k], {"perm": [0, 1, 3, 2]}), v])])
    return ir.Graph(inputs, [state, emit("MatMul", [q, state])], nodes=nodes, opset_imports={"": version}, name=prefix)
