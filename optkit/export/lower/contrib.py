"""com.microsoft operators for onnxscript translations, and helpers every table shares.

The operators are described to onnxscript alone: ``onnx.defs.register_schema`` would be global and breaks onnxscript's own
rewrites of models that use them.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import onnxscript

_TYPES = [
    f"tensor({t})"
    for t in [
        "float",
        "float16",
        "bfloat16",
        "double",
        "int64",
        "int32",
        "uint8",
        "int8",
        "bool",
        "uint4",
        "int4",
    ]
]
_KINDS = {"i": onnx.defs.OpSchema.AttrType.INT, "f": onnx.defs.OpSchema.AttrType.FLOAT, "s": onnx.defs.OpSchema.AttrType.STRING}


def contrib(name: str, inputs: int, outputs: int, attributes: dict[str, str]) -> onnxscript.values.Op:
    """An operator of ``com.microsoft`` with optional inputs; ``attributes`` maps names to ``i``, ``f`` or ``s``."""
    schema = onnx.defs.OpSchema
    optional = schema.FormalParameterOption.Optional
    definition = schema(
        name,
        "com.microsoft",
        1,
        inputs=[schema.FormalParameter(f"x{i}", f"T{i}", param_option=optional) for i in range(inputs)],
        outputs=[schema.FormalParameter(f"y{i}", f"R{i}") for i in range(outputs)],
        type_constraints=[(f"T{i}", _TYPES, "") for i in range(inputs)] + [(f"R{i}", _TYPES, "") for i in range(outputs)],
        attributes=[schema.Attribute(a, _KINDS[k], "", required=False) for a, k in attributes.items()],
    )
    return onnxscript.values.Op(onnxscript.values.Opset("com.microsoft", 1), name, definition)


GroupQueryAttention = contrib(
    "GroupQueryAttention",
    17,
    3,
    {
        "num_heads": "i",
        "kv_num_heads": "i",
        "scale": "f",
        "softcap": "f",
        "local_window_size": "i",
        "do_rotary": "i",
        "rotary_interleaved": "i",
    },
)
RotaryEmbedding = contrib("RotaryEmbedding", 4, 1, {"interleaved": "i", "rotary_embedding_dim": "i", "num_heads": "i"})
_MOE = {
    "k": "i",
    "activation_type": "s",
    "swiglu_fusion": "i",
    "activation_alpha": "f",
    "activation_beta": "f",
    "swiglu_limit": "f",
    "normalize_routing_weights": "i",
}
MoE = contrib("MoE", 6, 1, _MOE)
QMoE = contrib("QMoE", 15, 1, {**_MOE, "expert_weight_bits": "i", "block_size": "i", "accuracy_level": "i"})
MatMulNBits = contrib("MatMulNBits", 6, 1, {"K": "i", "N": "i", "bits": "i", "block_size": "i", "accuracy_level": "i"})
GatherBlockQuantized = contrib(
    "GatherBlockQuantized", 4, 1, {"bits": "i", "block_size": "i", "quantize_axis": "i", "gather_axis": "i"}
)
# Not an operator of anybody: stands for a dequantized table until portable.restore_tables computes it.
DequantizedTable = contrib("DequantizedTable", 3, 1, {"bits": "i"})
FusedMatMul = contrib("FusedMatMul", 2, 1, {"transA": "i", "transB": "i", "alpha": "f"})
# ONNX Runtime registers this one in the ONNX domain; finish() moves it there.
SimplifiedLayerNormalization = contrib("SimplifiedLayerNormalization", 2, 1, {"axis": "i", "epsilon": "f", "stash_type": "i"})


def translation(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method as the plain function that torch.onnx wants: tensors unannotated, attributes with their real types."""
    signature = inspect.signature(method, eval_str=True)
    kinds = {n: p.annotation for n, p in signature.parameters.items() if p.annotation in (int, float, bool, str)}

    def function(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    function.__name__ = method.__name__
    function.__annotations__ = kinds
    empty = inspect.Parameter.empty
    parameters = [p.replace(annotation=kinds.get(n, empty)) for n, p in signature.parameters.items()]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def opset(version: int) -> Any:
    """onnxscript's opset module of that version."""
    return getattr(onnxscript.onnx_opset, f"opset{version}")


def typed(value: Any, like: Any, shape: Sequence[Any]) -> Any:
    """Sets the type of a translated value: its dtype as ``like``'s (contrib outputs come without one)."""
    value.dtype, value.shape = like.dtype if hasattr(like, "dtype") else like, ir.Shape(list(shape))
    return value


def initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """Registers a constant under a free name."""
    unique = next(
        n for n in itertools.chain([name], (f"{name}_{i}" for i in itertools.count(1))) if n not in graph.initializers
    )
    value = ir.Value(name=unique, const_value=tensor)
    value.shape, value.dtype = ir.Shape(list(tensor.shape)), tensor.dtype  # type: ignore[arg-type]
    graph.register_initializer(value)
    return value


def lazy(make: Callable[[], Any], dtype: ir.DataType, shape: Sequence[int], name: str) -> ir.LazyTensor:
    """A tensor computed when it is written, so that nothing is held."""
    return ir.LazyTensor(lambda: ir.tensor(make(), dtype=dtype), dtype=dtype, shape=ir.Shape(list(shape)), name=name)
