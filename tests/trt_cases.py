"""Small ONNX graphs for TensorRT, written by hand: one construct each, and one complete decoder.

:data:`CASES` holds every row of the table of what TensorRT takes (``docs/tensorrt.md``), both ways: a graph it builds and
the neighbouring one that it refuses, drops or misreads. ``verdict`` is what the *library* says; ``rule`` is what the lint
has to say. The tests give each case to both, so neither can drift from the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from optkit.export.engine_worker import attention_layers

F32, F16, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
I64, I32, I8, BOOL = TensorProto.INT64, TensorProto.INT32, TensorProto.INT8, TensorProto.BOOL
NUMPY = {F32: np.float32, F16: np.float16, BF16: ml_dtypes.bfloat16}
#: symbol -> (min, opt, max), for the profile of a case
SYMBOLS = {"b": (1, 2, 4), "s": (1, 5, 64), "p": (1, 7, 64), "t": (2, 12, 128), "n": (1, 2, 3), "m": (128, 128, 128)}
node = helper.make_node


def constant(name: str, value: Any) -> TensorProto:
    return numpy_helper.from_array(np.asarray(value), name)


def weights(*shape: int, dtype: Any = np.float16, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.1).astype(dtype)


def make(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[tuple[str, int, Sequence[int | str]]],
    outputs: Sequence[tuple[str, int, Sequence[int | str]]],
    initializers: Sequence[TensorProto] = (),
    opset: int = 24,
    domains: Sequence[str] = (),
) -> onnx.ModelProto:
    infos = [[helper.make_tensor_value_info(*value) for value in values] for values in (inputs, outputs)]
    graph = helper.make_graph(list(nodes), "case", *infos, list(initializers))
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(
        graph, opset_imports=imports, ir_version={19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 24: 12}.get(opset, 13)
    )


def profile_of(model: onnx.ModelProto, symbols: Mapping[str, tuple[int, int, int]] = SYMBOLS) -> dict[str, Any]:
    """The shapes of one profile for a case's dynamic inputs."""
    constants = {i.name for i in model.graph.initializer}
    shapes = {}
    for value in model.graph.input:
        dims = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        if value.name not in constants and any(isinstance(d, str) for d in dims):
            shapes[value.name] = tuple(tuple(symbols[d][k] if isinstance(d, str) else d for d in dims) for k in range(3))
    return {"name": "case", "shapes": shapes}


@dataclass(frozen=True)
class Case:
    """One graph and what becomes of it.

    Attributes:
        verdict: ``builds``, ``refused`` (parser), ``fails`` (builder), ``dropped`` (an input is ignored), ``misread``, or
            ``unproven``: builds, and whether it computes the right thing cannot be seen without a GPU.
        rule: the lint's rule for a graph that is not taken as meant; empty for a good one.
        node: what the finding has to name.
        misread: for ``misread``: a check of the parsed network, given (library, network), that shows it.
    """

    name: str
    model: Callable[[], onnx.ModelProto]
    verdict: str = "builds"
    rule: str = ""
    node: str = "it"
    capabilities: tuple[str, ...] = ("8.6",)
    decompose: bool = True
    misread: Callable[[Any, Any], bool] | None = field(default=None, compare=False)


# ---------------------------------------------------------------- attention


def attention(
    kind: int = F16,
    opset: int = 24,
    head_dim: int = 64,
    heads: tuple[int, int] = (4, 2),
    keys: str = "t",
    mask: int | None = BOOL,
    past: bool = False,
    nonpad: bool = False,
    scores: bool = False,
    value_dim: int | None = None,
    **attributes: Any,
) -> onnx.ModelProto:
    query, cached = heads
    fresh = "s" if past else keys
    names = ["q", "k", "v", "", "", "", ""]
    inputs: list[Any] = [
        ("q", kind, ["b", query, "s", head_dim]),
        ("k", kind, ["b", cached, fresh, head_dim]),
        ("v", kind, ["b", cached, fresh, value_dim or head_dim]),
    ]
    outputs: list[Any] = [("y", kind, ["b", query, "s", value_dim or head_dim])]
    results = ["y"]
    if mask is not None:
        inputs.append(("mask", mask, ["b", 1, "s", keys]))
        names[3] = "mask"
    if past:
        inputs += [(n, kind, ["b", cached, "p", head_dim]) for n in ("pk", "pv")]
        outputs += [(n, kind, ["b", cached, "t", head_dim]) for n in ("nk", "nv")]
        names[4:6], results = ["pk", "pv"], ["y", "nk", "nv"]
    if nonpad:
        inputs.append(("valid", I64, ["b"]))
        names[6] = "valid"
    if scores:
        outputs.append(("scores", kind, ["b", query, "s", keys]))
        results = ["y", "", "", "scores"]
    while not names[-1]:
        names.pop()
    return make([node("Attention", names, results, name="it", **attributes)], inputs, outputs, opset=opset)


def plain_attention(kind: int = F16, head_dim: int = 20, softcap: float = 0.0) -> onnx.ModelProto:
    """MatMul, (Tanh,) Where, Softmax, MatMul: what the exporter writes where no attention kernel is."""
    cap = (
        [node("Div", ["s1", "cap"], ["c1"]), node("Tanh", ["c1"], ["c2"]), node("Mul", ["c2", "cap"], ["s2"])]
        if softcap
        else []
    )
    nodes = [
        node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q", "kt"], ["s0"]),
        node("Mul", ["s0", "scale"], ["s1"]),
        *cap,
        node("Where", ["mask", "s2" if softcap else "s1", "low"], ["s3"]),
        node("Softmax", ["s3"], ["p"], axis=-1),
        node("MatMul", ["p", "v"], ["y"]),
    ]
    inputs = [(n, kind, ["b", 4, d, head_dim]) for n, d in (("q", "s"), ("k", "t"), ("v", "t"))]
    dtype = NUMPY[kind]
    constants = [constant("scale", np.array(0.2, dtype)), constant("low", np.array(-6e4, dtype))]
    constants += [constant("cap", np.array(softcap, dtype))] if softcap else []
    return make(nodes, [*inputs, ("mask", BOOL, ["b", 1, "s", "t"])], [("y", kind, ["b", 4, "s", head_dim])], constants)


# ---------------------------------------------------------------- the cache


def scatter(
    kind: int = F16,
    length: int | str = 128,
    axis: int = -2,
    rank: int = 4,
    head: int = 64,
    cache_is_input: bool = True,
    result_is_output: bool = True,
    **attributes: Any,
) -> onnx.ModelProto:
    cache: list[int | str] = ["b", 2, length, head] if rank == 4 else ["b", length, head]
    update = list(cache)
    update[axis] = "s"
    nodes = [] if cache_is_input else [node("Neg", ["cache"], ["negated"])]
    source, result = ("cache" if cache_is_input else "negated"), ("out" if result_is_output else "inner")
    nodes.append(node("TensorScatter", [source, "update", "at"], [result], name="it", axis=axis, **attributes))
    nodes += [] if result_is_output else [node("Neg", ["inner"], ["out"])]
    return make(nodes, [("cache", kind, cache), ("update", kind, update), ("at", I64, ["b"])], [("out", kind, cache)])


def scatter_shared(second: str) -> onnx.ModelProto:
    """A cache with a second reader: another scatter of the ``cache``, one of its ``result``, or a plain ``reader``."""
    shape = ["b", 2, 128, 64]
    inputs = [("cache", F16, shape), ("update", F16, ["b", 2, "s", 64]), ("at", I64, ["b"])]
    first = node("TensorScatter", ["cache", "update", "at"], ["one"], name="it", axis=-2)
    if second == "reader":
        return make([first, node("Neg", ["cache"], ["two"])], inputs, [("one", F16, shape), ("two", F16, shape)])
    if second == "after":
        return make([first, node("Neg", ["one"], ["two"])], inputs, [("one", F16, shape), ("two", F16, shape)])
    source = {"cache": "cache", "result": "one"}[second]
    other = node("TensorScatter", [source, "update", "at"], ["two"], name="other", axis=-2)
    outputs = [("one", F16, shape), ("two", F16, shape)] if second == "cache" else [("two", F16, shape)]
    return make([first, other], inputs, outputs)


def concat_cache_int8() -> onnx.ModelProto:
    nodes = [
        node("QuantizeLinear", ["k", "scale"], ["kq"], name="it", output_dtype=I8),
        node("Concat", ["past", "kq"], ["present"], axis=2),
        node("DequantizeLinear", ["present", "scale"], ["kd"]),
        node("MatMul", ["q", "kd"], ["y"]),
    ]
    inputs = [("q", F16, ["b", 2, "s", "t"]), ("k", F16, ["b", 2, "s", 64]), ("past", I8, ["b", 2, "p", 64])]
    return make(
        nodes,
        inputs,
        [("y", F16, ["b", 2, "s", 64]), ("present", I8, ["b", 2, "t", 64])],
        [constant("scale", np.float16(0.02))],
    )


# ---------------------------------------------------------------- quantized weights

RANGES = {
    TensorProto.INT4: (-8, 8),
    TensorProto.UINT4: (0, 16),
    TensorProto.INT8: (-128, 128),
    TensorProto.UINT8: (0, 256),
    TensorProto.INT2: (-2, 2),
}


def weight_only(
    stored: int = TensorProto.INT4,
    block: int | None = 32,
    kind: int = F16,
    zero: int | None = None,
    opset: int = 24,
    size: tuple[int, int] = (128, 96),
    first_scale: float | None = None,
) -> onnx.ModelProto:
    """``x @ dequantize(W)`` with W ``[K, N]`` blocked along K, or one scale per column."""
    inputs, outputs = size
    low, high = RANGES[stored]
    rng = np.random.default_rng(1)
    codes = rng.integers(low, high, size)
    scale_shape = (inputs // block, outputs) if block else (outputs,)
    scale = (rng.random(scale_shape) * 0.02 + 0.001).astype(NUMPY[kind])
    if first_scale is not None:
        scale.flat[0] = first_scale
    constants = [helper.make_tensor("W", stored, size, codes.flatten().tolist()), constant("scale", scale)]
    names = ["W", "scale"]
    if zero is not None:
        constants.append(helper.make_tensor("zero", stored, scale_shape, [zero] * scale.size))
        names.append("zero")
    attributes = {"axis": 0, "block_size": block} if block else {"axis": 1}
    nodes = [node("DequantizeLinear", names, ["Wd"], name="it", **attributes), node("MatMul", ["x", "Wd"], ["y"])]
    return make(nodes, [("x", kind, ["b", "s", inputs])], [("y", kind, ["b", "s", outputs])], constants, opset=opset)


def quantized_activations(kind: int = F16, zero: int = 0, dtype: Any = np.int8) -> onnx.ModelProto:
    rng = np.random.default_rng(2)
    constants = [
        constant("scale", np.array(0.02, NUMPY[kind])),
        constant("zero", np.array(zero, dtype)),
        constant("W", rng.integers(-127, 127, (64, 32)).astype(np.int8)),
        constant("ws", (rng.random(32) * 0.01 + 0.001).astype(NUMPY[kind])),
    ]
    nodes = [
        node("QuantizeLinear", ["x", "scale", "zero"], ["xq"], name="it"),
        node("DequantizeLinear", ["xq", "scale", "zero"], ["xd"], name="back"),
        node("DequantizeLinear", ["W", "ws"], ["Wd"], name="weight", axis=1),
        node("MatMul", ["xd", "Wd"], ["y"]),
    ]
    return make(nodes, [("x", kind, ["b", "s", 64])], [("y", kind, ["b", "s", 32])], constants)


def requantized(stored: int, stated: bool, scale: float = 0.1) -> onnx.ModelProto:
    """There and back, without a zero point; the type is an attribute or ONNX's default."""
    attributes = {"output_dtype": stored} if stated else {}
    nodes = [
        node("QuantizeLinear", ["x", "scale"], ["xq"], name="it", **attributes),
        node("DequantizeLinear", ["xq", "scale"], ["y"], name="back"),
    ]
    return make(nodes, [("x", F16, ["b", "s", 64])], [("y", F16, ["b", "s", 64])], [constant("scale", np.float16(scale))])


def float8(stored: int = TensorProto.FLOAT8E4M3FN) -> onnx.ModelProto:
    dtype = ml_dtypes.float8_e4m3fn if stored == TensorProto.FLOAT8E4M3FN else ml_dtypes.float8_e5m2
    w = weights(64, 32, dtype=np.float32).astype(dtype)
    constants = [
        constant("scale", np.float16(0.02)),
        helper.make_tensor("W", stored, [64, 32], w.tobytes(), raw=True),
        helper.make_tensor("zero", stored, [], bytes(1), raw=True),
    ]
    nodes = [
        node("QuantizeLinear", ["x", "scale", "zero"], ["xq"]),
        node("DequantizeLinear", ["xq", "scale", "zero"], ["xd"]),
        node("DequantizeLinear", ["W", "scale", "zero"], ["Wd"], name="it"),
        node("MatMul", ["xd", "Wd"], ["y"]),
    ]
    return make(nodes, [("x", F16, ["b", "s", 64])], [("y", F16, ["b", "s", 32])], constants)


# ---------------------------------------------------------------- other operators


def unary(operator: str, kind: int = F16, domain: str = "", opset: int = 24, **attributes: Any) -> onnx.ModelProto:
    nodes = [node(operator, ["x"], ["y"], name="it", domain=domain, **attributes)]
    return make(
        nodes, [("x", kind, ["b", "s", 64])], [("y", kind, ["b", "s", 64])], opset=opset, domains=[domain] if domain else []
    )


def norm(operator: str, kind: int = F16, domain: str = "", skip: bool = False) -> onnx.ModelProto:
    names, results = (["x", "r", "g"], ["y", "", "", "sum"]) if skip else (["x", "g"], ["y"])
    attributes = {"epsilon": 1e-5} if skip else {"epsilon": 1e-5, "axis": -1}
    shape = ["b", "s", 64]
    inputs = [("x", kind, shape), *([("r", kind, shape)] if skip else [])]
    outputs = [("y", kind, shape), *([("sum", kind, shape)] if skip else [])]
    nodes = [node(operator, names, results, name="it", domain=domain, **attributes)]
    return make(nodes, inputs, outputs, [constant("g", weights(64, dtype=NUMPY[kind]))], domains=[domain] if domain else [])


def rotary(kind: int = F16, domain: str = "", rotated: int = 32, **attributes: Any) -> onnx.ModelProto:
    tables = [constant(n, weights(128, rotated, dtype=NUMPY[kind])) for n in ("cos", "sin")]
    names = ["x", "p", "cos", "sin"] if domain else ["x", "cos", "sin", "p"]
    nodes = [node("RotaryEmbedding", names, ["y"], name="it", domain=domain, **attributes)]
    shape = ["b", 4, "s", 64]
    return make(
        nodes, [("x", kind, shape), ("p", I64, ["b", "s"])], [("y", kind, shape)], tables, domains=[domain] if domain else []
    )


def mask_in_graph(window: int | None = None) -> onnx.ModelProto:
    """Scatter into a static cache and attend under a bool mask built from position_ids: the exporter's attention."""
    nodes = [
        node("TensorScatter", ["pk", "k", "at"], ["nk"], axis=-2),
        node("TensorScatter", ["pv", "v", "at"], ["nv"], axis=-2),
        *mask_nodes(window),
        node("Attention", ["q", "nk", "nv", "mask"], ["y"], name="it", is_causal=0),
    ]
    inputs = [(n, F16, ["b", h, "s", 64]) for n, h in (("q", 4), ("k", 2), ("v", 2))]
    inputs += [(n, F16, ["b", 2, 128, 64]) for n in ("pk", "pv")] + [("at", I64, ["b"]), ("position_ids", I64, ["b", "s"])]
    outputs = [("y", F16, ["b", 4, "s", 64])] + [(n, F16, ["b", 2, 128, 64]) for n in ("nk", "nv")]
    return make(nodes, inputs, outputs, mask_constants(128, window))


def mask_nodes(window: int | None) -> list[onnx.NodeProto]:
    nodes = [node("Unsqueeze", ["position_ids", "mask_axes"], ["query_slot"])]  # [B, 1, S, 1]
    if window is None:
        return [*nodes, node("LessOrEqual", ["slots", "query_slot"], ["mask"])]
    return [
        *nodes,
        node("LessOrEqual", ["slots", "query_slot"], ["past_mask"]),
        node("Sub", ["query_slot", "window"], ["first_slot"]),
        node("Greater", ["slots", "first_slot"], ["window_mask"]),
        node("And", ["past_mask", "window_mask"], ["mask"]),
    ]


def mask_constants(length: int, window: int | None) -> list[TensorProto]:
    found = [
        constant("slots", np.arange(length, dtype=np.int64).reshape(1, 1, 1, length)),
        constant("mask_axes", np.array([1, 3], np.int64)),
    ]
    return found + ([constant("window", np.int64(window))] if window is not None else [])


MS = "com.microsoft"


def matmul_nbits() -> onnx.ModelProto:
    rng = np.random.default_rng(3)
    constants = [
        constant("B", rng.integers(0, 256, (96, 4, 16)).astype(np.uint8)),
        constant("scale", weights(96, 4)),
    ]
    nodes = [node("MatMulNBits", ["x", "B", "scale"], ["y"], name="it", domain=MS, K=128, N=96, bits=4, block_size=32)]
    return make(nodes, [("x", F16, ["b", "s", 128])], [("y", F16, ["b", "s", 96])], constants, domains=[MS])


def group_query_attention() -> onnx.ModelProto:
    inputs = [("q", F16, ["b", "s", 256]), ("k", F16, ["b", "s", 128]), ("v", F16, ["b", "s", 128])]
    inputs += [(n, F16, ["b", 2, "p", 64]) for n in ("pk", "pv")] + [("seqlens", I32, ["b"]), ("total", I32, [1])]
    names = ["q", "k", "v", "pk", "pv", "seqlens", "total"]
    nodes = [
        node("GroupQueryAttention", names, ["y", "nk", "nv"], name="it", domain=MS, num_heads=4, kv_num_heads=2, scale=0.125)
    ]
    outputs = [("y", F16, ["b", "s", 256])] + [(n, F16, ["b", 2, "t", 64]) for n in ("nk", "nv")]
    return make(nodes, inputs, outputs, domains=[MS])


def multi_head_attention() -> onnx.ModelProto:
    nodes = [node("MultiHeadAttention", ["q", "k", "v"], ["y"], name="it", domain=MS, num_heads=4)]
    inputs = [(n, F16, ["b", "s", 256]) for n in "qkv"]
    return make(nodes, inputs, [("y", F16, ["b", "s", 256])], domains=[MS])


def top_k(k: int | None) -> onnx.ModelProto:
    inputs: list[Any] = [("x", F32, ["b", 8000])] + ([("k", I64, [1])] if k is None else [])
    width: int | str = k or "n"
    outputs = [("v", F32, ["b", width]), ("i", I64, ["b", width])]
    return make(
        [node("TopK", ["x", "k"], ["v", "i"], name="it", axis=-1)],
        inputs,
        outputs,
        [] if k is None else [constant("k", np.array([k]))],
    )


def scatter_nd(operator: str, **attributes: Any) -> onnx.ModelProto:
    index = ["b", "s", 2] if operator == "ScatterND" else ["b", "s", 64]
    attributes |= {} if operator == "ScatterND" else {"axis": 1}
    inputs = [("c", F16, ["b", 128, 64]), ("i", I64, index), ("u", F16, ["b", "s", 64])]
    return make([node(operator, ["c", "i", "u"], ["y"], name="it", **attributes)], inputs, [("y", F16, ["b", 128, 64])])


def two_types(cast: bool) -> onnx.ModelProto:
    nodes = [node("Cast", ["W"], ["Wc"], to=F16)] if cast else []
    nodes.append(node("MatMul", ["x", "Wc" if cast else "W"], ["y"], name="it"))
    return make(nodes, [("x", F16, ["b", 64])], [("y", F16, ["b", 32])], [constant("W", weights(64, 32, dtype=np.float32))])


def dynamic_quantize() -> onnx.ModelProto:
    nodes = [node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], name="it"), node("Cast", ["q"], ["y"], to=F32)]
    return make(nodes, [("x", F32, ["b", "s"])], [("y", F32, ["b", "s"])])


def matmul_integer() -> onnx.ModelProto:
    nodes = [node("MatMulInteger", ["x", "W"], ["a"], name="it"), node("Cast", ["a"], ["y"], to=F32)]
    return make(nodes, [("x", I8, ["b", 64])], [("y", F32, ["b", 32])], [constant("W", np.ones((64, 32), np.int8))])


def extra_input(use: str) -> onnx.ModelProto:
    """An input ``extra`` that is used, unused, only used by a dead node, or has a default."""
    shape = ["b"]
    inputs = [("x", F16, shape), ("extra", F16, shape if use != "default" else [1])]
    nodes = [node("Neg", ["x"], ["y"], name="it")]
    if use in ("used", "default"):
        nodes = [node("Add", ["x", "extra"], ["y"], name="it")]
    if use == "dead":
        nodes.append(node("Cast", ["extra"], ["nowhere"], to=F32))
    return make(nodes, inputs, [("y", F16, shape)], [constant("extra", np.ones(1, np.float16))] if use == "default" else [])


def doubled(kind: int) -> onnx.ModelProto:
    return make([node("Add", ["x", "x"], ["y"], name="it")], [("x", kind, ["b"])], [("y", kind, ["b"])])


def cast_to(kind: int) -> onnx.ModelProto:
    nodes = [node("Cast", ["x"], ["d"], name="it", to=kind), node("Cast", ["d"], ["y"], to=F32)]
    return make(nodes, [("x", F32, ["b"])], [("y", F32, ["b"])])


def linear_attention() -> onnx.ModelProto:
    names = ["q", "k", "v", "state", "decay", "beta"]
    nodes = [node("LinearAttention", names, ["y", "new"], name="it", q_num_heads=2, kv_num_heads=2, update_rule="gated_delta")]
    inputs = [(n, F32, ["b", "s", 64]) for n in "qkv"] + [("state", F32, ["b", 2, 32, 32])]
    inputs += [(n, F32, ["b", "s", 2]) for n in ("decay", "beta")]
    return make(nodes, inputs, [("y", F32, ["b", "s", 64]), ("new", F32, ["b", 2, 32, 32])], opset=27)


def bfloat_matmul() -> onnx.ModelProto:
    weight = constant("W", weights(64, 32, dtype=ml_dtypes.bfloat16))
    return make([node("MatMul", ["x", "W"], ["y"], name="it")], [("x", BF16, ["b", 64])], [("y", BF16, ["b", 32])], [weight])


# ---------------------------------------------------------------- a whole decoder


def codes_and_scales(w: np.ndarray, bits: int, group: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Round to nearest, symmetric, in blocks of ``group`` inputs: int8 codes ``[I, O]`` and scales ``[I / group, O]``."""
    limit = 2 ** (bits - 1) - 1
    scale = np.maximum(np.abs(w.reshape(-1, group, w.shape[1])).max(1) / limit, 1e-8).astype(dtype)
    codes = np.clip(np.rint(w / np.repeat(scale.astype(np.float32), group, 0)), -limit - 1, limit)
    return codes.astype(np.int8), scale


def rounded(state: Mapping[str, np.ndarray], bits: int, group: int = 32, dtype: Any = np.float16) -> dict[str, np.ndarray]:
    """The weights the quantized decoder has: its linears through their codes and back."""
    result = dict(state)
    for name, value in state.items():
        if bits < 16 and value.ndim == 2 and "embed" not in name:
            codes, scale = codes_and_scales(np.ascontiguousarray(value.T), bits, group, dtype)
            result[name] = np.ascontiguousarray((codes * np.repeat(scale.astype(np.float32), group, 0)).T)
    return result


def decoder(
    state: Mapping[str, np.ndarray],
    config: Any,
    *,
    dtype: Any = np.float16,
    bits: int = 16,
    window: int | None = None,
    slots: int = 256,
    group: int = 32,
    last_only: bool = False,
) -> onnx.ModelProto:
    """A grouped-query decoder with rotary positions, RMSNorm and a SiLU gate, in the exporter's dialect for TensorRT.

    Args:
        state: weights by transformers' names (the llama family), float32.
        config: of the model: sizes, rotary base, epsilon.
        dtype: of activations, caches and unquantized weights.
        bits: 16, or 8 or 4 for weight-only linears in blocks of ``group``, symmetric.
        window: tokens a query sees, itself included.
        slots: S_max.
        last_only: logits of each row's last token (input ``query_lens``), instead of those of ``logits_positions``.
    """
    heads, cached, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    kind = {np.float16: F16, np.float32: F32, ml_dtypes.bfloat16: BF16}[dtype]
    nodes: list[onnx.NodeProto] = mask_nodes(window)
    constants: list[TensorProto] = mask_constants(slots, window)
    inputs: list[Any] = [("input_ids", I64, ["batch_size", "sequence_length"])]
    inputs += [("position_ids", I64, ["batch_size", "sequence_length"]), ("write_indices", I64, ["batch_size"])]
    outputs: list[Any] = [("logits", kind, ["batch_size", "logits_count", config.vocab_size])]
    angles = np.arange(slots)[:, None] / config.rope_parameters["rope_theta"] ** (np.arange(0, size, 2) / size)
    constants += [constant("cos", np.cos(angles).astype(dtype)), constant("sin", np.sin(angles).astype(dtype))]
    constants += [constant("split", np.array([0, 0, -1, size])), constant("joined", np.array([0, 0, heads * size]))]

    def linear(x: str, name: str, y: str) -> str:
        w = np.ascontiguousarray(state[name + ".weight"].T)  # [I, O]
        if bits == 16:
            constants.append(constant(name, w.astype(dtype)))
            nodes.append(node("MatMul", [x, name], [y], name=f"{name}.matmul"))
            return y
        codes, scale = codes_and_scales(w, bits, group, dtype)
        stored = TensorProto.INT4 if bits == 4 else TensorProto.INT8
        constants.append(helper.make_tensor(name + ".codes", stored, codes.shape, codes.flatten().tolist()))
        constants.append(constant(name + ".scale", scale))
        pair = [name + ".codes", name + ".scale"]
        nodes.append(node("DequantizeLinear", pair, [name], name=f"{name}.dequantize", axis=0, block_size=group))
        nodes.append(node("MatMul", [x, name], [y], name=f"{name}.matmul"))
        return y

    def rms(x: str, name: str, y: str) -> str:
        constants.append(constant(name, state[name + ".weight"].astype(dtype)))
        nodes.append(node("RMSNormalization", [x, name], [y], name=f"{name}.norm", axis=-1, epsilon=config.rms_norm_eps))
        return y

    def heads_of(x: str, y: str) -> str:
        nodes.append(node("Reshape", [x, "split"], [y + ".4d"]))
        nodes.append(node("Transpose", [y + ".4d"], [y], perm=[0, 2, 1, 3]))
        return y

    constants.append(constant("embedding", state["model.embed_tokens.weight"].astype(dtype)))
    nodes.append(node("Gather", ["embedding", "input_ids"], ["h"], axis=0))
    hidden = "h"
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        x = rms(hidden, at + "input_layernorm", at + "x")
        q, k, v = (heads_of(linear(x, f"{at}self_attn.{n}_proj", f"{at}{n}"), f"{at}{n}h") for n in "qkv")
        for name in (q, k):
            nodes.append(node("RotaryEmbedding", [name, "cos", "sin", "position_ids"], [name + ".r"], name=name + ".rotary"))
        for role, fresh in (("key", k + ".r"), ("value", v)):
            past, present = f"past_key_values.{i}.{role}", f"present.{i}.{role}"
            shape = ["batch_size", cached, slots, size]
            inputs.append((past, kind, shape))
            outputs.append((present, kind, shape))
            nodes.append(node("TensorScatter", [past, fresh, "write_indices"], [present], name=f"{present}.scatter", axis=-2))
        names = [q + ".r", f"present.{i}.key", f"present.{i}.value", "mask"]
        nodes.append(node("Attention", names, [at + "a"], name=at + "attention", is_causal=0, scale=size**-0.5))
        nodes.append(node("Transpose", [at + "a"], [at + "at"], perm=[0, 2, 1, 3]))
        nodes.append(node("Reshape", [at + "at", "joined"], [at + "flat"]))
        nodes.append(node("Add", [hidden, linear(at + "flat", at + "self_attn.o_proj", at + "o")], [at + "mid"]))
        x = rms(at + "mid", at + "post_attention_layernorm", at + "y")
        gate, up = linear(x, at + "mlp.gate_proj", at + "gate"), linear(x, at + "mlp.up_proj", at + "up")
        nodes.append(node("Sigmoid", [gate], [at + "sig"]))
        nodes.append(node("Mul", [gate, at + "sig"], [at + "silu"]))
        nodes.append(node("Mul", [at + "silu", up], [at + "act"]))
        nodes.append(node("Add", [at + "mid", linear(at + "act", at + "mlp.down_proj", at + "down")], [at + "out"]))
        hidden = at + "out"
    if last_only:
        outputs[0] = ("logits", kind, ["batch_size", 1, config.vocab_size])
        inputs.append(("query_lens", I64, ["batch_size"]))
        constants += [constant("one", np.int64(1)), constant("first_axis", np.array([1]))]
        nodes.append(node("Sub", ["query_lens", "one"], ["last"]))
        nodes.append(node("Unsqueeze", ["last", "first_axis"], ["last_index"]))
        nodes.append(node("GatherND", [hidden, "last_index"], ["wanted.flat"], batch_dims=1))
        nodes.append(node("Unsqueeze", ["wanted.flat", "first_axis"], ["wanted"]))
    else:
        inputs.append(("logits_positions", I64, ["logits_count"]))
        nodes.append(node("Gather", [hidden, "logits_positions"], ["wanted"], axis=1))
    linear(rms("wanted", "model.norm", "normed"), "lm_head", "logits")
    return make(nodes, inputs, outputs, constants)


def good(name: str, model: Callable[[], onnx.ModelProto], **options: Any) -> Case:
    return Case(name, model, **options)


def bad(name: str, model: Callable[[], onnx.ModelProto], verdict: str, rule: str, **options: Any) -> Case:
    return Case(name, model, verdict, rule, **options)


def layers_of(network: Any) -> list[Any]:
    return [network.get_layer(i) for i in range(network.num_layers)]


def upper_left(trt: Any, network: Any) -> bool:
    """The causal mask is aligned to the upper left corner, whatever the lengths are."""
    kinds = [attention.causal_kind for _, attention in attention_layers(trt, network)]
    return kinds == [trt.CausalMaskKind.UPPER_LEFT]


def unmasked(trt: Any, network: Any) -> bool:
    """Nothing restricts what the attention sees."""
    found = [attention for _, attention in attention_layers(trt, network)]
    return len(found) == 1 and found[0].mask is None and not found[0].causal


def outputs_are(kind: str, dtype: str) -> Callable[[Any, Any], bool]:
    """Every layer of ``kind`` gives ``dtype``."""

    def check(trt: Any, network: Any) -> bool:
        wanted = getattr(trt.LayerType, kind)
        types = [layer.get_output(0).dtype for layer in layers_of(network) if layer.type == wanted]
        return types != [] and all(t == getattr(trt.DataType, dtype) for t in types)

    return check


def input_types(*wanted: str) -> Callable[[Any, Any], bool]:
    """The network's inputs have these types."""

    def check(trt: Any, network: Any) -> bool:
        return [network.get_input(i).dtype for i in range(network.num_inputs)] == [getattr(trt.DataType, w) for w in wanted]

    return check


CASES = (
    # Attention in half precision, grouped heads, masks, head_dim
    good("attention fp16, bool mask, grouped heads", attention),
    good("attention opset 23", lambda: attention(opset=23)),
    good("attention with a float mask", lambda: attention(mask=F16)),
    good("attention bf16", lambda: attention(kind=BF16)),
    *(good(f"attention head_dim {d}", lambda d=d: attention(head_dim=d)) for d in (16, 32, 80, 128, 256)),
    good("attention head_dim 512, decomposed", lambda: attention(head_dim=512)),
    bad("attention head_dim 512", lambda: attention(head_dim=512), "fails", "attention-head-dim", decompose=False),
    bad("attention head_dim 20 with a mask", lambda: attention(head_dim=20), "fails", "attention-head-dim"),
    good("head_dim 20 as MatMul and Softmax", plain_attention),
    good("attention fp32, decomposed", lambda: attention(kind=F32)),
    bad("attention fp32", lambda: attention(kind=F32), "fails", "attention-f32", decompose=False),
    bad("attention value head_dim differs", lambda: attention(value_dim=32), "refused", "attention-value-dim"),
    # its optional parts
    bad("attention with past and present", lambda: attention(past=True), "refused", "attention-past"),
    bad("attention scores as an output", lambda: attention(scores=True), "refused", "attention-qk-output"),
    good("attention softcap 0", lambda: attention(softcap=0.0)),
    bad("attention softcap", lambda: attention(softcap=30.0), "refused", "attention-softcap"),
    good("softcap as Tanh", lambda: plain_attention(softcap=30.0)),
    bad("attention softmax_precision", lambda: attention(softmax_precision=F32), "refused", "attention-softmax-precision"),
    bad("attention mask and is_causal", lambda: attention(is_causal=1), "refused", "attention-mask-causal"),
    bad("attention nonpad_kv_seqlen", lambda: attention(mask=None, nonpad=True), "dropped", "attention-nonpad"),
    bad(
        "attention left_window_size",
        lambda: attention(mask=None, opset=25, left_window_size=4),
        "misread",
        "attention-window",
        misread=unmasked,
    ),
    bad(
        "attention right_window_size",
        lambda: attention(mask=None, opset=25, right_window_size=4),
        "misread",
        "attention-window",
        misread=unmasked,
    ),
    good("attention windows switched off", lambda: attention(mask=None, opset=25, left_window_size=-1, right_window_size=-1)),
    bad(
        "attention is_causal over a cache",
        lambda: attention(mask=None, is_causal=1),
        "misread",
        "attention-causal",
        misread=upper_left,
    ),
    good("attention is_causal over itself", lambda: attention(mask=None, is_causal=1, keys="s")),
    # TensorScatter
    good("scatter fp16", scatter),
    good("scatter fp32", lambda: scatter(kind=F32)),
    good("scatter bf16", lambda: scatter(kind=BF16)),
    good("scatter axis 2", lambda: scatter(axis=2)),
    bad("scatter circular", lambda: scatter(mode="circular"), "refused", "scatter-circular"),
    bad("scatter axis 1", lambda: scatter(axis=1), "refused", "scatter-axis"),
    bad("scatter axis -1", lambda: scatter(axis=-1), "refused", "scatter-axis"),
    bad("scatter of three dimensions", lambda: scatter(rank=3), "refused", "scatter-rank"),
    bad("scatter dynamic S_max", lambda: scatter(length="m"), "refused", "scatter-dynamic"),
    bad("scatter int8", lambda: scatter(kind=I8), "refused", "scatter-type"),
    bad("scatter into a computed cache", lambda: scatter(cache_is_input=False), "fails", "scatter-input"),
    bad("scatter result is not an output", lambda: scatter(result_is_output=False), "fails", "scatter-output"),
    bad("scatter twice into one cache", lambda: scatter_shared("cache"), "fails", "scatter-twice"),
    bad("scatter of a scatter", lambda: scatter_shared("result"), "fails", "scatter-output"),
    bad("scatter and a reader of the old cache", lambda: scatter_shared("reader"), "unproven", "scatter-read-old"),
    good("scatter and a reader of the result", lambda: scatter_shared("after")),
    good("scatter, mask in the graph, attention", mask_in_graph),
    good("scatter, mask with a window, attention", lambda: mask_in_graph(window=8)),
    good("INT8 cache through Concat", concat_cache_int8),
    # weight-only quantization
    *(good(f"INT4 block {b}", lambda b=b: weight_only(block=b)) for b in (16, 32, 64, 128)),
    good("INT4 bf16", lambda: weight_only(kind=BF16)),
    good("INT4 zero point 0", lambda: weight_only(zero=0)),
    bad("INT4 zero point 1", lambda: weight_only(zero=1), "refused", "zero-point"),
    bad("UINT4", lambda: weight_only(TensorProto.UINT4), "refused", "dequantize-type"),
    bad("INT2", lambda: weight_only(TensorProto.INT2, opset=25), "refused", "dequantize-type"),
    bad("UINT8", lambda: weight_only(TensorProto.UINT8, block=None), "refused", "dequantize-type"),
    good("INT8 blocks", lambda: weight_only(TensorProto.INT8)),
    good("INT8 per column", lambda: weight_only(TensorProto.INT8, block=None)),
    bad("INT8 zero point 3", lambda: weight_only(TensorProto.INT8, block=None, zero=3), "refused", "zero-point"),
    good("INT4 negative scale", lambda: weight_only(first_scale=-0.01)),
    good("INT4 scale 0", lambda: weight_only(first_scale=0.0)),
    bad("INT8 negative scale", lambda: weight_only(TensorProto.INT8, first_scale=-0.01), "refused", "scale-sign"),
    bad("INT8 scale 0", lambda: weight_only(TensorProto.INT8, block=None, first_scale=0.0), "refused", "scale-sign"),
    bad("QDQ scale 0", lambda: requantized(TensorProto.INT8, True, scale=0.0), "refused", "scale-sign"),
    good("INT4 on 8.0 and 12.0", weight_only, capabilities=("8.0", "12.0")),
    bad("INT4 on 7.5", weight_only, "fails", "capability", node="W", capabilities=("7.5", "8.6")),
    good("INT8 on 7.5", lambda: weight_only(TensorProto.INT8), capabilities=("7.5",)),
    # quantized activations
    good("QDQ INT8 fp16", quantized_activations),
    good("QDQ INT8 fp32", lambda: quantized_activations(F32)),
    bad("QDQ zero point 5", lambda: quantized_activations(zero=5), "refused", "zero-point"),
    bad("QDQ UINT8 zero point 128", lambda: quantized_activations(zero=128, dtype=np.uint8), "refused", "zero-point"),
    bad(
        "QDQ UINT8 zero point 0",
        lambda: quantized_activations(dtype=np.uint8),
        "misread",
        "quantize-unsigned",
        misread=outputs_are("QUANTIZE", "INT8"),
    ),
    good("quantize to INT4", lambda: requantized(TensorProto.INT4, stated=True)),
    bad("quantize to UINT4", lambda: requantized(TensorProto.UINT4, stated=True), "refused", "quantize-type"),
    bad("quantize to INT16", lambda: requantized(TensorProto.INT16, stated=True), "refused", "quantize-type"),
    bad("quantize to a stated UINT8", lambda: requantized(TensorProto.UINT8, stated=True), "refused", "quantize-type"),
    bad(
        "quantize to the default type, which is UINT8",
        lambda: requantized(TensorProto.UINT8, stated=False),
        "misread",
        "quantize-unsigned",
        misread=outputs_are("QUANTIZE", "INT8"),
    ),
    bad("dynamic quantization", dynamic_quantize, "refused", "operator"),
    bad("integer MatMul", matmul_integer, "refused", "operator"),
    good("FP8 on 8.9 and 12.0", float8, capabilities=("8.9", "12.0")),
    bad("FP8 on 8.6", float8, "fails", "capability", node="W"),
    bad("FP8 E5M2", lambda: float8(TensorProto.FLOAT8E5M2), "refused", "dequantize-type", capabilities=("8.9",)),
    good("bf16 on 8.0", bfloat_matmul, capabilities=("8.0",)),
    bad("bf16 on 7.5", bfloat_matmul, "fails", "capability", node="W", capabilities=("7.5",)),
    # norms, rotary, activations
    good("RMSNormalization", lambda: norm("RMSNormalization")),
    good("RMSNormalization fp32", lambda: norm("RMSNormalization", F32)),
    good("LayerNormalization", lambda: norm("LayerNormalization")),
    good("SimplifiedLayerNormalization", lambda: norm("SimplifiedLayerNormalization", domain=MS)),
    good("SkipSimplifiedLayerNormalization", lambda: norm("SkipSimplifiedLayerNormalization", domain=MS, skip=True)),
    bad(
        "SkipLayerNormalization", lambda: norm("SkipLayerNormalization", domain=MS, skip=True), "refused", "operator-microsoft"
    ),
    good("RotaryEmbedding", rotary),
    good("RotaryEmbedding interleaved", lambda: rotary(interleaved=1)),
    good("RotaryEmbedding partial", lambda: rotary(rotated=16, rotary_embedding_dim=32)),
    good("RotaryEmbedding of com.microsoft", lambda: rotary(domain=MS)),
    good("Swish", lambda: unary("Swish")),
    good("Gelu", lambda: unary("Gelu", approximate="tanh")),
    bad("QuickGelu", lambda: unary("QuickGelu", domain=MS), "refused", "operator-microsoft"),
    # fused operators of ONNX Runtime and other domains
    bad("MatMulNBits", matmul_nbits, "refused", "operator-microsoft"),
    bad("GroupQueryAttention", group_query_attention, "refused", "operator-microsoft"),
    good("MultiHeadAttention", multi_head_attention),
    bad("an operator of another domain", lambda: unary("Mine", domain="my.ops"), "refused", "operator-domain"),
    bad("LinearAttention", linear_attention, "refused", "operator"),
    bad("BitwiseNot", lambda: unary("BitwiseNot", I32), "refused", "operator"),
    # types, inputs, limits
    good("MatMul after a Cast", lambda: two_types(True)),
    bad("MatMul of two types", lambda: two_types(False), "refused", "matmul-types"),
    good("int64 arithmetic", lambda: doubled(I64)),
    bad("uint32", lambda: doubled(TensorProto.UINT32), "refused", "type", node="x"),
    bad(
        "double input",
        lambda: doubled(TensorProto.DOUBLE),
        "misread",
        "double",
        node="x",
        misread=input_types("FLOAT"),
    ),
    good("cast to float16", lambda: cast_to(F16)),
    bad(
        "cast to double",
        lambda: cast_to(TensorProto.DOUBLE),
        "misread",
        "double",
        misread=outputs_are("CAST", "FLOAT"),
    ),
    good("an input that is used", lambda: extra_input("used")),
    bad("an input that nothing reads", lambda: extra_input("unused"), "dropped", "input-unused", node="extra"),
    bad("an input only a dead node reads", lambda: extra_input("dead"), "dropped", "input-unused", node="extra"),
    bad(
        "an input with a default",
        lambda: extra_input("default"),
        "misread",
        "input-default",
        node="extra",
        misread=input_types("HALF"),
    ),
    good("TopK 3840", lambda: top_k(3840)),
    bad("TopK 3841", lambda: top_k(3841), "fails", "topk-limit"),
    bad("TopK of a dynamic k", lambda: top_k(None), "fails", "topk-dynamic"),
    good("ScatterND", lambda: scatter_nd("ScatterND")),
    bad("ScatterND with a reduction", lambda: scatter_nd("ScatterND", reduction="add"), "refused", "scatter-reduction"),
    good("ScatterElements", lambda: scatter_nd("ScatterElements")),
    bad(
        "ScatterElements with a reduction",
        lambda: scatter_nd("ScatterElements", reduction="add"),
        "refused",
        "scatter-reduction",
    ),
)
