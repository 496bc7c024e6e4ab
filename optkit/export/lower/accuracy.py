"""Which quantized products compute in float32 although the others round their activations to int8.

ONNX Runtime's ``MatMulNBits`` at accuracy level 4 rounds activations to int8 per block: about twice as fast on a CPU, and
another source of error beside the weights. Measured on SmolLM2-135M w4a16 g32, KL from the same weights in float32, 1,536
positions of speeches: all products at level 4 0.0032 nats (asymmetric 0.0035); with the head at level 1 0.0024 (0.0027);
with the projections of attention 0.0023 (0.0025); asymmetric with both 0.0017. gate and up together give as much as either
for three times the weights of the projections; down and o give little. So the head and what feeds attention, a third of
the weights, are kept at another level.

They are found in the graph: the head makes the logits; attention's inputs are followed back through operators that only
move or turn values.
"""

from __future__ import annotations

import onnx_ir as ir

from optkit.io_spec import LOGITS

ATTENTION = ("GroupQueryAttention", "Attention")
MOVES = (
    *("Split", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Identity", "Cast"),  # move values
    *("Add", "Mul", "Div", "Tanh"),  # biases, logit scales and soft caps
    *("RotaryEmbedding", "SimplifiedLayerNormalization", "RMSNormalization"),  # turn and scale heads
)
QUANTIZED = "MatMulNBits"


def set_sensitive(model: ir.Model, level: int) -> int:
    """Sets the accuracy level of the head and of the products that feed attention; returns how many there were."""
    starts = [value for value in model.graph.outputs if value.name == LOGITS]
    for node in model.graph:
        if node.op_type in ATTENTION:
            starts += [value for value in node.inputs[:3] if value is not None]
    found = {node for value in starts for node in _products(value)}
    for node in found:
        node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", level)
    return len(found)


def _products(value: ir.Value) -> set[ir.Node]:
    """The quantized products a value comes from, through operators that do not mix positions or features by weights."""
    found: set[ir.Node] = set()
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop().producer()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if node.op_type == QUANTIZED:
            found.add(node)
        elif node.op_type in MOVES:
            waiting += [v for v in node.inputs[:1] if v is not None]
    return found
