"""Passes of the targets in standard operators: quantized linears as DequantizeLinear + MatMul, transposed constants.

ONNX ``DequantizeLinear`` (opset 21): ``y = (x - x_zero_point) * x_scale``, blocked along ``axis`` with ``block_size`` when
the scale has one entry per block, per axis when it is a vector. Weights are stored ``[I, O]``, which is what MatMul
multiplies by and the only layout in which ONNX Runtime recognises the pair. Symmetric codes are signed (code - 2**(bits-1)),
asymmetric ones unsigned.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from optkit import packing
from optkit.errors import UnsupportedError
from optkit.export.lower.contrib import initializer, lazy
from optkit.export.lower.passes import rename_output

_NUMPY = {
    ir.DataType.INT4: ml_dtypes.int4,
    ir.DataType.UINT4: ml_dtypes.uint4,
    ir.DataType.INT8: np.int8,
    ir.DataType.UINT8: np.uint8,
}


def transpose_constants(graph: ir.Graph, tied: set[str]) -> int:
    """``Transpose`` of a constant that nobody else reads -> the transposed constant, made when the file is written."""
    count = 0
    for node in list(graph):
        weight = node.inputs[0] if node.op_type == "Transpose" and node.inputs else None
        if weight is None or weight.const_value is None or weight.name in tied or len(list(weight.uses())) > 1:
            continue
        data, order = weight.const_value, node.attributes["perm"].as_ints()
        shape = [int(data.shape[i]) for i in order]  # type: ignore[arg-type]
        name = f"{weight.name}.T"
        turned = lazy(lambda d=data, o=order: np.ascontiguousarray(d.numpy().transpose(o)), data.dtype, shape, name)  # type: ignore[misc]
        node.outputs[0].replace_all_uses_with(initializer(graph, name, turned))
        graph.remove(node, safe=True)
        count += 1
    return count


def standard_quantized_linears(graph: ir.Graph, symmetric_only: bool) -> int:
    """``MatMulNBits`` -> ``DequantizeLinear`` + ``MatMul`` (+ ``Add``).

    Raises:
        UnsupportedError: zero points where the target takes symmetric weights only.
    """
    nodes = [node for node in graph if node.op_type == "MatMulNBits"]
    asymmetric = [n for n in nodes if len(n.inputs) > 3 and n.inputs[3] is not None]
    if symmetric_only and asymmetric:
        raise UnsupportedError(
            f"{len(asymmetric)} linears have zero points (first {asymmetric[0].inputs[1].name}), and TensorRT takes symmetric "  # type: ignore[union-attr]
            "weights only: quantize with symmetric: true"
        )
    for node in nodes:
        _standard(graph, node)
    return len(nodes)


def _standard(graph: ir.Graph, node: ir.Node) -> None:
    x, packed, scale, zero_point, _, bias = (*node.inputs, *[None] * 6)[:6]
    assert x is not None
    assert packed is not None
    assert scale is not None
    bits, block, inputs, outputs = (node.attributes[a].as_int() for a in ("bits", "block_size", "K", "N"))
    groups, base = inputs // block, str(packed.name).removesuffix("_packed")
    symmetric = zero_point is None
    kinds = {(4, True): "INT4", (4, False): "UINT4", (8, True): "INT8", (8, False): "UINT8"}
    dtype = ir.DataType[kinds[bits, symmetric]]
    offset = (1 << (bits - 1)) if symmetric else 0

    def codes(d: Any = packed.const_value) -> Any:
        unsigned = packing.unpack_nbits(d.numpy(), bits, block).T.astype(np.int16)
        return np.ascontiguousarray(unsigned - offset).astype(_NUMPY[dtype])

    def scales(d: Any = scale.const_value) -> Any:
        return np.ascontiguousarray(d.numpy().T) if groups > 1 else d.numpy().reshape(-1)

    grid = (groups, outputs) if groups > 1 else (outputs,)
    arguments: list[ir.Value | None] = [
        initializer(graph, f"{base}.codes", lazy(codes, dtype, (inputs, outputs), f"{base}.codes")),
        initializer(graph, f"{base}.scales", lazy(scales, scale.dtype, grid, f"{base}.scales")),  # type: ignore[arg-type]
    ]
    if zero_point is not None:

        def zeros(d: Any = zero_point.const_value) -> Any:
            spread = packing.unpack_bytes(d.numpy(), bits, groups).T
            return np.ascontiguousarray(spread).reshape(grid).astype(_NUMPY[dtype])

        arguments.append(initializer(graph, f"{base}.zeros", lazy(zeros, dtype, grid, f"{base}.zeros")))
    attributes: dict[str, Any] = {"axis": 0, "block_size": block} if groups > 1 else {"axis": 1}
    restored = ir.node("DequantizeLinear", arguments, attributes)
    product = ir.node("MatMul", [x, restored.outputs[0]])
    new = [restored, product]
    if bias is not None:
        new.append(ir.node("Add", [product.outputs[0], bias]))
    restored.outputs[0].dtype, restored.outputs[0].shape = x.dtype, ir.Shape([inputs, outputs])  # type: ignore[assignment]
    for index, made in enumerate(new):
        made.outputs[0].name = f"{base}.{('weight', 'product', 'sum')[index]}"
    old, out = node.outputs[0], new[-1].outputs[0]
    product.outputs[0].dtype, product.outputs[0].shape = old.dtype, old.shape  # type: ignore[assignment]
    out.dtype, out.shape = old.dtype, old.shape  # type: ignore[assignment]
    graph.insert_before(node, new)
    rename_output(graph, old, out)
    graph.remove(node, safe=True)


def restore_tables(graph: ir.Graph) -> int:
    """``DequantizedTable`` -> the table, in the scale's dtype, computed when the file is written."""
    count = 0
    for node in [n for n in graph if n.op_type == "DequantizedTable"]:
        packed, scale, zero_point = (None if v is None else v.const_value for v in (*node.inputs, None)[:3])
        bits, out = node.attributes["bits"].as_int(), node.outputs[0]
        rows, width = (int(n) for n in out.shape)  # type: ignore[union-attr, arg-type]

        def table(p: Any = packed, s: Any = scale, z: Any = zero_point, b: int = bits, shape: Any = (rows, width)) -> Any:
            grid = s.numpy()
            codes = packing.unpack_bytes(p.numpy(), b, p.shape[2] * 8 // b).astype(np.float32)
            zeros = np.float32(1 << (b - 1)) if z is None else packing.unpack_bytes(z.numpy(), b, grid.shape[1])[..., None]
            return ((codes - zeros) * grid.astype(np.float32)[..., None]).reshape(shape).astype(grid.dtype)

        name = f"{node.inputs[0].name}.table"  # type: ignore[union-attr]
        out.replace_all_uses_with(initializer(graph, name, lazy(table, scale.dtype, (rows, width), name)))  # type: ignore[union-attr]
        graph.remove(node, safe=True)
        count += 1
    return count


def gathered_groups(graph: ir.Graph) -> dict[str, int]:
    """Zero points of a quantized embedding -> its number of groups: that of the scales the same ids gather."""
    found: dict[str, int] = {}
    for node in graph:
        if node.op_type != "Gather" or node.inputs[0] is None or not str(node.inputs[0].name).endswith("weight_zero_point"):
            continue
        scales = str(node.inputs[0].name).removesuffix("weight_zero_point") + "weight_scale"
        if scales in graph.initializers:
            found[str(node.inputs[0].name)] = int(graph.initializers[scales].shape[1])  # type: ignore[index, arg-type]
    return found


def spread_gathered_zero_points(graph: ir.Graph, groups_of: dict[str, int]) -> int:
    """Packed zero points ``[V, ceil(G/2)]`` that a ``Gather`` reads -> one byte per group, ``[V, G]``."""
    count = 0
    for node in graph:
        value = node.inputs[0] if node.op_type == "Gather" and node.inputs else None
        if value is None or value.const_value is None or str(value.name) not in groups_of:
            continue
        data, groups = value.const_value, groups_of[str(value.name)]
        rows, width = (int(n) for n in data.shape)  # type: ignore[arg-type]
        bits = 4 if width < groups else 8
        name = f"{value.name}.spread"

        def spread(d: Any = data, b: int = bits, g: int = groups) -> Any:
            return packing.unpack_bytes(d.numpy(), b, g)

        tensor = lazy(spread, ir.DataType.UINT8, (rows, groups), name)
        node.replace_input_with(0, initializer(graph, name, tensor))
        count += 1
    return count
