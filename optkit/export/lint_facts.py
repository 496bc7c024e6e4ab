"""What the lint says (:class:`Finding`), and what its rules ask of a graph: attributes, element types, dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

REFUSED = "refused"  # the parser says no
FAILS = "fails to build"  # parses, and the builder says no
SILENT = "silently wrong"  # builds, and computes something else
NOTE = "note"  # builds and is right, but slower or unproven


@dataclass(frozen=True)
class Finding:
    """One construct TensorRT will not take as it is meant.

    Attributes:
        rule: short identifier, ``attention-causal``.
        node: name of the node (or of the input), and the names of its outputs when it has none.
        op: operator type.
        effect: one of :data:`REFUSED`, :data:`FAILS`, :data:`SILENT`, :data:`NOTE`.
        reason: what TensorRT does with it.
        remedy: what to write instead.
    """

    rule: str
    node: str
    op: str
    effect: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.node} ({self.op}): {self.reason}; {self.remedy} [{self.rule}, {self.effect}]"


@dataclass(frozen=True)
class Context:
    """What the rules may ask besides the node."""

    model: ir.Model
    flavour: str
    capabilities: tuple[str, ...]
    decompose_attention: bool

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph


Found = Iterator[tuple[str, str, str, str]]  # rule, effect, reason, remedy
Rule = Callable[[ir.Node, Context], Found]


def number(node: ir.Node, name: str, default: Any) -> Any:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value


def given(node: ir.Node, index: int) -> ir.Value | None:
    """The node's input, ``None`` when it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def output_used(node: ir.Node, index: int) -> bool:
    return index < len(node.outputs) and bool(node.outputs[index].name)


def element_type(value: ir.Value | None, depth: int = 200) -> str:
    """Element type of a value (ONNX IR's name), annotated or found from the nodes before it; "" if unknown."""
    if value is None or depth == 0:
        return ""
    if value.dtype is not None:
        return str(value.dtype.name)
    if value.const_value is not None:
        return str(value.const_value.dtype.name)
    node = value.producer()
    if node is None:
        return ""
    if node.op_type == "Cast":
        return str(ir.DataType(number(node, "to", 1)).name)
    if node.op_type == "DequantizeLinear":
        return element_type(given(node, 1), depth - 1)
    if node.op_type == "QuantizeLinear":
        stated = number(node, "output_dtype", 0)
        return str(ir.DataType(stated).name) if stated else element_type(given(node, 2), depth - 1) or "UINT8"
    if node.op_type in ("LessOrEqual", "Less", "Greater", "GreaterOrEqual", "Equal", "And", "Or", "Not"):
        return "BOOL"
    if node.op_type in ("Shape", "Size", "ArgMax", "NonZero"):
        return "INT64"
    source = 1 if node.op_type == "Where" else 0
    return element_type(given(node, source), depth - 1)


def dims(value: ir.Value | None) -> tuple[Any, ...] | None:
    """Dimensions of a value: numbers, symbol names, ``None``; the whole is ``None`` when the rank is unknown.

    Without an annotation, looks through the operators that keep a shape (scatter into a cache, rotary, normalization).
    """
    for _ in range(20):
        if value is None:
            return None
        if value.shape is not None:
            return tuple(d if isinstance(d, int) else d.value for d in value.shape)
        node = value.producer()
        if node is None or node.op_type not in (
            "TensorScatter",
            "RotaryEmbedding",
            "RMSNormalization",
            "Cast",
            "Identity",
            "Mul",
            "Add",
        ):
            return None
        value = given(node, 0)
    return None


def label(node: ir.Node) -> str:
    return node.name or "output " + ", ".join(v.name for v in node.outputs if v.name)
