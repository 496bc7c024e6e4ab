"""bfloat16 arithmetic, which ONNX Runtime's CPU provider does not have, computed in float32 and rounded back.

Some models round a small table to bfloat16 whatever their own dtype (linear attention biases). The rounding is part of the
model's answers, so it stays: each operator's bfloat16 inputs are cast up and its outputs down again. Operators that only move
data are left alone, for the provider moves any type.
"""

from __future__ import annotations

import onnx_ir as ir

_MOVES = frozenset(
    [
        "Cast",
        "CastLike",
        "Concat",
        "Expand",
        "Gather",
        "Identity",
        "Reshape",
        "Shape",
        "Slice",
        "Split",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    ]
)


def compute_in_float32(graph: ir.Graph) -> int:
    """Rewrites every operator that computes in bfloat16; returns how many."""
    count = 0
    widened: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        narrow = [i for i, value in enumerate(node.inputs) if value is not None and value.dtype == ir.DataType.BFLOAT16]
        outputs = [value for value in node.outputs if value.dtype == ir.DataType.BFLOAT16]
        if node.op_type in _MOVES or not (narrow or outputs):
            continue
        for index in narrow:
            value = node.inputs[index]
            assert value is not None
            if value not in widened:  # nodes are in order, so the first use is before all others
                widened[value] = _cast_before(graph, node, value)
            node.replace_input_with(index, widened[value])
        for value in outputs:
            _cast_after(graph, node, value)
        count += 1
    return count


def _cast_before(graph: ir.Graph, node: ir.Node, value: ir.Value) -> ir.Value:
    cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT.value})
    wide = cast.outputs[0]
    wide.name, wide.dtype, wide.shape = f"{value.name}_float32", ir.DataType.FLOAT, value.shape
    graph.insert_before(node, cast)
    return wide


def _cast_after(graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
    cast = ir.node("Cast", [value], {"to": ir.DataType.BFLOAT16.value})
    narrow = cast.outputs[0]
    narrow.name, narrow.dtype, narrow.shape = f"{value.name}_rounded", ir.DataType.BFLOAT16, value.shape
    graph.insert_after(node, cast)
    value.replace_all_uses_with(narrow, replace_graph_outputs=True)
    cast.replace_input_with(0, value)
    value.dtype = ir.DataType.FLOAT
