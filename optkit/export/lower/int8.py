"""Linears with 8-bit activations (w8a8) in standard operators: what ``QuantizeLinear`` and ``DequantizeLinear`` say.

A static scale ``a`` (one per linear, calibrated)::

    y = DQ(Q(x, a), a) · DQ(W, w)                     Q(x, a) = clip(round(x / a), -128, 127), ties to even

A scale per token, found at run time, is the same on inputs divided by it first, so that the scale of the operators is the
constant 1 and no operator with a scale per row is needed (``QuantizeLinear`` has none)::

    t = max(amax|x|, tiny) / 127.5        [..., 1], as compressed-tensors has it
    y = t · (DQ(Q(x / t, 1), 1) · DQ(W, w))

ONNX Runtime makes ``MatMulIntegerToFloat`` of the pattern: products of int8 and int8 in its integer kernels. Measured on one
core (EPYC with VNNI), ``[1, 576] · [576, 1536]``: 39 µs this way, 33 µs ``MatMulNBits`` at accuracy level 4, 83 µs float32;
for 128 rows 0.91, 1.57 and 2.27 ms. ``MatMulNBits`` is not used, though it is quicker for one token: it rounds activations by
block, which is not what the checkpoint says. ``MatMulInteger`` of signed inputs is 20 to 50 times slower than either. On x86
CPUs without VNNI, ONNX Runtime's kernel for these types saturates sums of two products at 16 bits; the session option
:data:`optkit.io_spec.EXACT_INT8` avoids that, and every session of ours sets it.

The table emits ``Int8Linear``, an operator of nobody, which :func:`expand_linears` takes apart after siblings are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from optkit.errors import UnsupportedError
from optkit.export.lower.contrib import contrib, initializer, lazy
from optkit.export.lower.passes import rename_output

OPERATOR = "Int8Linear"
Int8Linear = contrib(OPERATOR, 5, 1, {})  # x, codes [O, 1, I] uint8, scale [O, 1], bias [O], input scale
INPUT_SCALE = 4  # which input
STEPS = 127.5  # half the range of int8, what a token's largest magnitude is divided by
TINY = 1e-30  # scale of a token of zeros: its codes are zero whatever the scale

_NUMPY = {ir.DataType.FLOAT: np.float32, ir.DataType.FLOAT16: np.float16}


class Expander:
    """Takes :data:`OPERATOR` nodes apart; what linears of one input share is made once.

    Args:
        graph: changed in place.
        wide: round and scale in float32 whatever the graph's type. TensorRT wants the graph's own type instead.
    """

    def __init__(self, graph: ir.Graph, wide: bool) -> None:
        self.graph, self.wide = graph, wide
        self.inputs: dict[Any, tuple[ir.Value, ir.Value | None]] = {}
        self.count = 0

    def emit(
        self, before: ir.Node, op: str, inputs: Sequence[ir.Value], like: ir.Value, name: str, **attributes: Any
    ) -> ir.Value:
        node = ir.node(op, list(inputs), attributes)
        out = node.outputs[0]
        out.name, out.dtype, out.shape = name, like.dtype, like.shape  # type: ignore[assignment]
        self.graph.insert_before(before, node)
        return out

    def constant(self, name: str, values: Any, dtype: ir.DataType) -> ir.Value:
        return initializer(self.graph, name, ir.tensor(np.asarray(values), dtype=dtype, name=name))

    def kind(self, x: ir.Value) -> ir.DataType:
        """The type that is computed in."""
        assert x.dtype is not None
        return ir.DataType.FLOAT if self.wide else x.dtype

    def expand(self, node: ir.Node) -> None:
        x, packed, scale, bias, input_scale = (*node.inputs, *[None] * 5)[:5]
        assert x is not None
        assert packed is not None
        assert scale is not None
        key = (id(x), id(input_scale))
        if key not in self.inputs:
            self.inputs[key] = self.rounded(node, x, input_scale, f"int8.{len(self.inputs)}")
        rounded, token = self.inputs[key]
        base, old = f"{str(packed.name).removesuffix('_packed')}.int8_{self.count}", node.outputs[0]
        self.count += 1
        value = self.emit(node, "MatMul", [rounded, self.weight(node, packed, scale, rounded, base)], old, f"{base}.product")
        value.dtype = rounded.dtype  # type: ignore[assignment]
        if token is not None:
            value = self.emit(node, "Mul", [value, token], value, f"{base}.scaled")
        if value.dtype != old.dtype:
            value = self.emit(node, "Cast", [value], old, f"{base}.narrow", to=int(old.dtype))  # type: ignore[arg-type]
        if bias is not None:
            value = self.emit(node, "Add", [value, bias], old, f"{base}.sum")
        rename_output(self.graph, old, value)
        self.graph.remove(node, safe=True)

    def rounded(self, node: ir.Node, x: ir.Value, input_scale: ir.Value | None, name: str) -> tuple[ir.Value, ir.Value | None]:
        """``x`` rounded to int8 and back, and the scale per token still to be multiplied by."""
        kind = self.kind(x)
        if x.dtype != kind:
            wide = self.emit(node, "Cast", [x], x, f"{name}.wide", to=int(kind))
            wide.dtype = kind
            x = wide
        if input_scale is not None:
            data = input_scale.const_value
            assert data is not None
            scale = self.constant(f"{name}.scale", data.numpy().astype(np.float32).reshape(()), ir.DataType.FLOAT)
            if kind != ir.DataType.FLOAT:
                scale = self.constant(f"{name}.scale", data.numpy().astype(np.float32).reshape(()).astype(_NUMPY[kind]), kind)
            return self.quantized(node, x, scale, name), None
        if kind != ir.DataType.FLOAT:
            raise UnsupportedError("activations with a scale per token are rounded in float32")
        peak = self.emit(node, "Abs", [x], x, f"{name}.abs")
        axes = self.constant(f"{name}.axes", np.array([-1], np.int64), ir.DataType.INT64)
        peak = self.emit(node, "ReduceMax", [peak, axes], x, f"{name}.peak", keepdims=1)
        peak.shape = ir.Shape([*x.shape[:-1], 1])  # type: ignore[index]
        steps, tiny, one = (self.constant(f"{name}.{n}", np.float32(v), kind) for n, v in _CONSTANTS)
        token = self.emit(node, "Div", [peak, steps], peak, f"{name}.step")
        token = self.emit(node, "Max", [token, tiny], peak, f"{name}.token")
        return self.quantized(node, self.emit(node, "Div", [x, token], x, f"{name}.units"), one, name), token

    def quantized(self, node: ir.Node, x: ir.Value, scale: ir.Value, name: str) -> ir.Value:
        zero = self.constant(f"{name}.zero", np.int8(0), ir.DataType.INT8)
        codes = self.emit(node, "QuantizeLinear", [x, scale, zero], x, f"{name}.codes")
        codes.dtype = ir.DataType.INT8
        return self.emit(node, "DequantizeLinear", [codes, scale, zero], x, f"{name}.rounded")

    def weight(self, node: ir.Node, packed: ir.Value, scale: ir.Value, like: ir.Value, base: str) -> ir.Value:
        """``DequantizeLinear`` of ``[I, O]`` int8 with a scale per column."""
        rows, _, width = (int(n) for n in packed.shape)  # type: ignore[union-attr, arg-type]
        assert like.dtype is not None

        def codes(d: Any = packed.const_value) -> Any:
            return np.ascontiguousarray((d.numpy()[:, 0].astype(np.int16) - 128).T.astype(np.int8))

        def scales(d: Any = scale.const_value) -> Any:
            wide = d.numpy().reshape(-1)
            return wide.astype(np.float32) if like.dtype == ir.DataType.FLOAT else wide

        dtype = ir.DataType.FLOAT if like.dtype == ir.DataType.FLOAT else scale.dtype
        arguments = [
            initializer(self.graph, f"{base}.codes", lazy(codes, ir.DataType.INT8, (width, rows), f"{base}.codes")),
            initializer(self.graph, f"{base}.scales", lazy(scales, dtype, (rows,), f"{base}.scales")),  # type: ignore[arg-type]
        ]
        out = self.emit(node, "DequantizeLinear", arguments, like, f"{base}.weight", axis=1)
        out.shape = ir.Shape([width, rows])
        return out


def explicit_zero_points(graph: ir.Graph) -> int:
    """Zeros for the int8 weights without zero points of a graph that multiplies int8 by int8; returns how many got some.

    ONNX Runtime rewrites *all* int8 weights of such a graph for CPUs without VNNI, and makes a scalar of the wrong shape where
    no zero point is given. The zeros are not shared, because it changes them in place.
    """
    nodes = [node for node in graph if node.op_type == "DequantizeLinear" and len(node.inputs) == 2]
    count = 0
    for node in nodes:
        codes, scale = node.inputs
        assert codes is not None
        assert scale is not None
        if codes.const_value is None or codes.const_value.dtype != ir.DataType.INT8:
            continue
        shape = tuple(int(n) for n in scale.const_value.shape)  # type: ignore[union-attr, arg-type]
        name = f"{codes.name}.zeros"
        zeros = lazy(lambda shape=shape: np.zeros(shape, np.int8), ir.DataType.INT8, shape, name)  # type: ignore[misc]
        node.resize_inputs(3)
        node.replace_input_with(2, initializer(graph, name, zeros))
        count += 1
    return count


_CONSTANTS = (("steps", STEPS), ("tiny", TINY), ("one", 1.0))


def expand_linears(graph: ir.Graph, wide: bool) -> int:
    """Takes every :data:`OPERATOR` apart; returns how many there were."""
    nodes = [node for node in graph if node.op_type == OPERATOR]
    expander = Expander(graph, wide)
    for node in nodes:
        expander.expand(node)
    return len(nodes)
