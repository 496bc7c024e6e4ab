"""The rules of the TensorRT lint; see :mod:`optkit.export.lint` for what they are and how they were established."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from optkit.export.lint_facts import (
    FAILS,
    NOTE,
    REFUSED,
    SILENT,
    Context,
    Finding,
    Found,
    Rule,
    dims,
    element_type,
    given,
    label,
    number,
    output_used,
)
from optkit.export.profiles import INT4_BLOCKS, LACKING, TOPK_LIMIT, attention_support

MICROSOFT = "com.microsoft"

# ---------------------------------------------------------------- attention and cache


def attention(node: ir.Node, context: Context) -> Found:
    if node.domain == MICROSOFT:
        return
    causal, mask = number(node, "is_causal", 0), given(node, 3)
    if given(node, 4) is not None or given(node, 5) is not None or output_used(node, 1) or output_used(node, 2):
        yield (
            "attention-past",
            REFUSED,
            "past and present go through TensorScatter, not through Attention",
            "scatter into a static cache",
        )
    if output_used(node, 3):
        yield "attention-qk-output", REFUSED, "the attention scores cannot be an output", "remove the fourth output"
    if number(node, "softcap", 0.0):
        yield "attention-softcap", REFUSED, "softcap is not supported", "write MatMul, Tanh, Softmax, MatMul instead"
    if "softmax_precision" in node.attributes:
        yield "attention-softmax-precision", REFUSED, "softmax_precision is not supported", "remove the attribute"
    if causal and mask is not None:
        yield "attention-mask-causal", REFUSED, "a mask together with is_causal=1", "put the causal part into the mask"
    if given(node, 6) is not None:
        yield "attention-nonpad", SILENT, "nonpad_kv_seqlen is ignored", "build the mask in the graph from position_ids"
    if any(number(node, side, -1) >= 0 for side in ("left_window_size", "right_window_size")):
        yield "attention-window", SILENT, "the window is ignored", "put the window into the mask"
    yield from _causal_alignment(node, mask, causal)
    yield from _attention_kernel(node, context, mask is not None)


def _causal_alignment(node: ir.Node, mask: ir.Value | None, causal: int) -> Found:
    query, key = dims(given(node, 0)), dims(given(node, 1))
    if not causal or mask is not None:
        return
    if query is not None and key is not None and query[-2] == key[-2] and query[-2] is not None:
        return  # a prompt attending to itself: both alignments are the same
    why = "is_causal is aligned to the upper left: with a cache, one query sees only slot 0"
    yield "attention-causal", SILENT, why, "use is_causal=0 and a bool mask built from position_ids"


def _attention_kernel(node: ir.Node, context: Context, masked: bool) -> Found:
    query, key, value = (dims(given(node, i)) for i in range(3))
    kind = element_type(given(node, 0))
    if query is None or len(query) != 4 or not isinstance(query[3], int):
        query = key if key is not None and len(key) == 4 and isinstance(key[3], int) else None
    if value is not None and query is not None and len(value) == 4 and isinstance(value[3], int) and value[3] != query[3]:
        yield (
            "attention-value-dim",
            REFUSED,
            f"value head_dim {value[3]} differs from {query[3]}",
            "pad, or write MatMul and Softmax",
        )
    if query is None:
        size = None
        heads, width = number(node, "q_num_heads", 0), dims(given(node, 0))
        if heads and width is not None and isinstance(width[-1], int):
            size = width[-1] // heads
    else:
        size = query[3]
    if kind not in ("FLOAT", "FLOAT16", "BFLOAT16") or size is None:
        return
    support = attention_support(size, kind, masked)
    if support == "none":
        yield (
            "attention-head-dim",
            FAILS,
            f"no attention kernel for head_dim {size} with a mask",
            "write MatMul and Softmax instead",
        )
    elif support == "decomposed" and not context.decompose_attention:
        rule = "attention-f32" if kind == "FLOAT" else "attention-head-dim"
        yield (
            rule,
            FAILS,
            f"no fused kernel for {kind} with head_dim {size}",
            "let the builder mark it decomposable, or use fp16",
        )
    elif support == "decomposed":
        yield (
            "attention-decomposed",
            NOTE,
            f"no fused kernel for {kind} with head_dim {size}",
            "built from separate kernels (slower)",
        )


def tensor_scatter(node: ir.Node, context: Context) -> Found:
    cache, shape = given(node, 0), dims(given(node, 0))
    axis = number(node, "axis", -2)
    if shape is not None and len(shape) != 4:
        yield "scatter-rank", REFUSED, f"the cache has {len(shape)} dimensions", "use [B, Hkv, S_max, D]"
    elif axis not in (-2, 2):
        yield (
            "scatter-axis",
            REFUSED,
            f"axis {axis}: only the third of four is supported",
            "lay the cache out as [B, Hkv, S_max, D]",
        )
    if number(node, "mode", "linear") != "linear":
        yield "scatter-circular", REFUSED, "circular mode is not supported", "use linear mode and a cache of S_max slots"
    if shape is not None and len(shape) == 4 and not isinstance(shape[2], int):
        yield "scatter-dynamic", REFUSED, "the cache length is dynamic", "export with a static S_max"
    kind = element_type(cache)
    if kind and kind not in ("FLOAT", "FLOAT16", "BFLOAT16"):
        yield "scatter-type", REFUSED, f"a cache of {kind}", "use a floating point cache, or Concat for an INT8 one"
    yield from _in_place(node, cache)


def _in_place(node: ir.Node, cache: ir.Value | None) -> Found:
    if cache is not None and not (cache.is_graph_input() and not cache.is_initializer()):
        yield "scatter-input", FAILS, "the cache is not a network input", "scatter straight into the past_key_values input"
    if not node.outputs[0].is_graph_output():
        yield "scatter-output", FAILS, "the updated cache is not a network output", "make it the present output"
    readers = [n for n, _ in cache.uses() if n is not node] if cache is not None else []
    if any(n.op_type == "TensorScatter" for n in readers):
        yield "scatter-twice", FAILS, "two updates of one cache", "give each its own cache input"
    elif readers:
        why = f"the cache is updated in place, and {label(readers[0])} reads the input too"
        yield (
            "scatter-read-old",
            SILENT,
            why + " (before or after the update is not defined)",
            "read the output of TensorScatter",
        )


# ---------------------------------------------------------------- quantization


#: stored types without an importer
UNSTORED = frozenset({"UINT4", "UINT8", "INT2", "UINT2", "INT16", "UINT16", "INT32", "FLOAT8E5M2"})


def dequantize(node: ir.Node, context: Context) -> Found:
    kind = element_type(given(node, 0))
    producer = node.inputs[0].producer() if node.inputs[0] is not None else None
    if kind in UNSTORED and (producer is None or producer.op_type != "QuantizeLinear"):  # else it is reported there
        yield (
            "dequantize-type",
            REFUSED,
            f"{kind} values",
            "store symmetric signed INT4 or INT8 (subtract the middle of the range)",
        )
    yield from _zero_point(node)
    if kind != "INT4":
        yield from _scale(node)
    block = number(node, "block_size", 0)
    opset = context.model.opset_imports.get("", 1)
    if block and opset < 21:
        why = f"block_size needs opset 21, the graph says {opset}: TensorRT takes it, ONNX checker and other runtimes do not"
        yield "dequantize-opset", REFUSED, why, "declare opset 21 or later"
    if kind == "INT4" and block and block not in INT4_BLOCKS:
        yield "dequantize-block", NOTE, f"INT4 block size {block} builds, but is unproven", "use 16, 32, 64 or 128"


def quantize(node: ir.Node, context: Context) -> Found:
    kind = element_type(node.outputs[0])
    if not kind:
        stated, zero = number(node, "output_dtype", 0), given(node, 2)
        kind = str(ir.DataType(stated).name) if stated else element_type(zero) if zero is not None else "UINT8"
    asymmetric = list(_zero_point(node))
    yield from asymmetric
    yield from _scale(node)
    if kind == "UINT8" and not number(node, "output_dtype", 0) and not asymmetric:
        yield (
            "quantize-unsigned",
            SILENT,
            "UINT8 is computed as signed INT8 (clips at 127)",
            "quantize to INT8 with zero point 0",
        )
    elif kind in UNSTORED and not asymmetric:
        yield "quantize-type", REFUSED, f"quantization to {kind}", "quantize to INT8 with zero point 0"


def _zero_point(node: ir.Node) -> Found:
    zero = given(node, 2)
    if zero is None:
        return
    if zero.const_value is None:
        yield "zero-point-dynamic", REFUSED, "a zero point that is not a constant", "use symmetric quantization"
    elif _any_nonzero(zero.const_value):
        yield "zero-point", REFUSED, "a zero point other than 0", "quantize symmetrically (signed, zero point 0)"


def _scale(node: ir.Node) -> Found:
    scale = given(node, 1)
    if scale is None or scale.const_value is None:
        return
    values = np.asarray(scale.const_value.numpy()).astype(np.float32)
    if not bool((values > 0).all()):
        why = "a scale that is not positive (INT4 weights may have such scales, nothing else may)"
        yield "scale-sign", REFUSED, why, "negate scale and codes; give an all-zero group the scale 1"


def _any_nonzero(tensor: ir.TensorProtocol) -> bool:
    return bool(np.any(np.asarray(tensor.numpy()).astype(np.float32) != 0))


# ---------------------------------------------------------------- single operators

#: com.microsoft operators the parser has importers for
MICROSOFT_KNOWN = frozenset(
    {"RotaryEmbedding", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "MultiHeadAttention", "Gelu"}
)
#: what to write instead of the ones exporters like to use
REPLACE = {
    "MatMulNBits": "write a blocked DequantizeLinear and a MatMul",
    "GroupQueryAttention": "write TensorScatter and Attention with a bool mask",
    "GatherBlockQuantized": "write DequantizeLinear and Gather",
    "SkipLayerNormalization": "write Add and LayerNormalization",
    "QuickGelu": "write Mul, Sigmoid, Mul",
    "DynamicQuantizeLinear": "quantize activations with a calibrated scale (QuantizeLinear, DequantizeLinear)",
    "MatMulInteger": "write DequantizeLinear and MatMul",
}
#: standard operators without an importer, or whose plugin is not in the library
UNKNOWN = frozenset(
    """AffineGrid Bernoulli BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor CausalConvWithState CenterCropPad
    Col2Im Compress ConcatFromSequence ConvInteger CumProd DFT DeformConv Det DynamicQuantizeLinear ImageDecoder
    LinearAttention MatMulInteger MaxRoiPool MaxUnpool MelWeightMatrix Multinomial NegativeLogLikelihoodLoss NonZero
    Optional OptionalGetElement OptionalHasElement QLinearConv QLinearMatMul RegexFullMatch SequenceAt
    SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap SoftmaxCrossEntropyLoss
    SplitToSequence StringConcat StringNormalizer StringSplit SwiGLU TfIdfVectorizer Unique""".split()  # noqa: SIM905
)


def known_operator(node: ir.Node, context: Context) -> Found:
    remedy = REPLACE.get(node.op_type, "write it with standard operators")
    if node.domain == MICROSOFT:
        if node.op_type not in MICROSOFT_KNOWN:
            yield "operator-microsoft", REFUSED, "a com.microsoft operator TensorRT has no plugin for", remedy
    elif node.domain not in ("", "ai.onnx"):
        if (node.domain, node.op_type, node.overload) not in context.model.functions:
            yield "operator-domain", REFUSED, f"an operator of domain {node.domain}", remedy
    elif node.op_type in UNKNOWN:
        yield "operator", REFUSED, "TensorRT has no such operator", remedy


def top_k(node: ir.Node, context: Context) -> Found:
    count = given(node, 1)
    if count is None:
        return
    if count.const_value is None:
        yield "topk-dynamic", FAILS, "k is not a constant", "make k a constant"
        return
    k = int(np.asarray(count.const_value.numpy()).reshape(-1)[0])
    if k > TOPK_LIMIT:
        yield "topk-limit", FAILS, f"k = {k} is more than {TOPK_LIMIT}", f"use at most {TOPK_LIMIT}"


def scatter_reduction(node: ir.Node, context: Context) -> Found:
    mode = number(node, "reduction", "none")
    if mode != "none":
        yield "scatter-reduction", REFUSED, f"reduction={mode} is not supported", "scatter without a reduction, then add"


def matmul_types(node: ir.Node, context: Context) -> Found:
    kinds = [element_type(given(node, i)) for i in (0, 1)]
    if all(kinds) and kinds[0] != kinds[1]:
        yield (
            "matmul-types",
            REFUSED,
            f"operands of {kinds[0]} and {kinds[1]} (networks are strongly typed)",
            "cast one of them",
        )


def cast_double(node: ir.Node, context: Context) -> Found:
    if number(node, "to", 1) == ir.DataType.DOUBLE:
        yield "double", SILENT, "double is computed as float", "cast to float"


UNTYPED = ("UINT16", "UINT32", "UINT64", "INT16", "STRING", "COMPLEX64", "COMPLEX128", "UINT4", "INT2", "UINT2", "FLOAT8E5M2")


# ---------------------------------------------------------------- the graph as a whole


def graph_io(context: Context) -> Iterator[Finding]:
    for value in context.graph.inputs:
        name = str(value.name)
        if value.is_initializer():
            why = "an input with a default becomes a constant: what a caller gives is ignored"
            yield Finding("input-default", name, "input", SILENT, why, "make it a plain input or a plain initializer")
            continue
        if not _reaches_output(value, context.graph):
            why = "nothing that leads to an output reads it: it would be a binding without effect"
            yield Finding("input-unused", name, "input", SILENT, why, "remove the input, or find out what dropped its use")
        if element_type(value) == "DOUBLE":
            yield Finding("double", name, "input", SILENT, "double is computed as float", "use float")
        if element_type(value) in UNTYPED:
            yield Finding("type", name, "input", REFUSED, f"no {element_type(value)} tensors", "use another type")


def _reaches_output(value: ir.Value, graph: ir.Graph) -> bool:
    seen: set[int] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if current.is_graph_output():
            return True
        for node, _ in current.uses():
            pending += list(node.outputs)
            if node.graph is not None and node.graph is not graph:
                return True  # read inside a branch or loop body
    return False


def initializer_types(context: Context) -> Iterator[Finding]:
    for name, value in context.graph.initializers.items():
        kind = element_type(value)
        quantized = all(n.op_type in ("DequantizeLinear", "QuantizeLinear") for n, _ in value.uses())
        if kind in UNTYPED and not (value.uses() and quantized):  # those have their own rules
            yield Finding("type", str(name), "initializer", REFUSED, f"no {kind} tensors", "use another type")


def hardware_types(context: Context) -> Iterator[Finding]:
    """Element types the named compute capabilities do not have; one finding for each, at the first value of that type."""
    if not context.capabilities:
        return
    where: dict[str, tuple[str, str]] = {}
    for name, value in context.graph.initializers.items():
        where.setdefault(element_type(value), (str(name), "initializer"))
    for value in context.graph.inputs:
        where.setdefault(element_type(value), (str(value.name), "input"))
    for kind, lacking in LACKING.items():
        missing = sorted(set(context.capabilities) & lacking)
        if kind in where and missing:
            name, op = where[kind]
            remedy = f"build without {', '.join(missing)}, or export without {kind}"
            yield Finding(
                "capability", name, op, FAILS, f"{kind} does not exist on compute capability {', '.join(missing)}", remedy
            )


GRAPH_RULES: tuple[Callable[[Context], Iterator[Finding]], ...] = (graph_io, initializer_types, hardware_types)
EVERY_NODE: tuple[Rule, ...] = (known_operator,)
RULES: dict[str, tuple[Rule, ...]] = {
    "Attention": (attention,),
    "TensorScatter": (tensor_scatter,),
    "DequantizeLinear": (dequantize,),
    "QuantizeLinear": (quantize,),
    "TopK": (top_k,),
    "ScatterND": (scatter_reduction,),
    "ScatterElements": (scatter_reduction,),
    "MatMul": (matmul_types,),
    "Cast": (cast_double,),
}
