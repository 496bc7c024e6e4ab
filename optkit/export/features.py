"""What a config asks of the numbers, and what in the finished graph does it.

Three witnesses are compared. The *config* says what the author wanted. The *model*, when it ran with our attention function
(hooks.py), said what it wants of each layer: window, soft cap, scale, sinks, norms of query and key. The *graph* must do it:
attributes of attention operators, constants that masks are compared with, caps and factors between the last product and the
logits, sizes of rotary tables, expert weights. Nothing is decided by the name of a tensor or of an architecture.

The verification runs short prompts, so what shows only beyond them (a window of 4,096, a rope that is scaled for long
sequences) rests on this evidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from torch import nn

from optkit.export.substitute import ExportExperts, ExportLinear, ExportQuantEmbedding, ExportQuantLinear
from optkit.io_spec import LOGITS, GraphSpec

ATTENTION = ("GroupQueryAttention", "Attention")
PRODUCTS = ("MatMul", "FusedMatMul", "MatMulNBits", "MatMulInteger", "Gemm", "QMoE", "MoE")
NORMS = (
    *("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "RMSNormalization", "LayerNormalization"),
    *("ReduceMean", "InstanceNormalization"),
)
COMPARISONS = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual")
_MASK_INPUT = {"GroupQueryAttention": 10, "Attention": 3}
_SINKS_INPUT = 11  # of GroupQueryAttention
_SCALED_ROPE = ("linear", "llama3", "yarn", "longrope")
_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

Feature = dict[str, Any]


def features(
    model: ir.Model, spec: GraphSpec, config: Any, source: nn.Module, calls: Sequence[dict[str, Any]]
) -> dict[str, Feature]:
    """Feature -> what is asked (``config``) and what in the graph does it (``evidence``; ``None``: nothing does).

    Args:
        model: the finished graph.
        spec: its inputs and outputs; the sizes of the caches are those of the untouched model's own cache.
        config: of the text model.
        source: the prepared torch model.
        calls: what the model passed to our attention function, one entry a call; empty where its own code attends.
    """
    nodes = [node for node in model.graph.all_nodes() if node.op_type in ATTENTION]
    found = {
        "kv_heads_and_size": kv_sizes(model, spec, config),
        "attention_scale": scales(nodes, calls),
        "attention_softcap": softcap(model, nodes, config, calls),
        "window": window(model, nodes, config),
        "sinks": sinks(model, nodes, calls),
        "qk_norm": qk_norms(nodes, calls),
        "rotary": rotary(model, spec, config),
        "experts": experts(model, config, source),
        "tied_embeddings": tied(model, source),
        **logit_features(model, config),
    }
    return {name: feature for name, feature in found.items() if feature is not None}


# ---------------------------------------------------------------------------------------------------- caches, attention


def kv_sizes(model: ir.Model, spec: GraphSpec, config: Any) -> Feature | None:
    """Heads and head size of the graph's cache inputs; they must be those of the model's own cache, layer by layer."""
    caches = [c for c in spec.caches if c.role in ("key", "value")]
    if not caches:
        return None
    inputs = {str(value.name): value.shape for value in model.graph.inputs}
    sizes = {(c.shape[1], c.shape[3]) for c in caches}
    right = all((shape := inputs.get(c.past)) is not None and (shape[1], shape[3]) == (c.shape[1], c.shape[3]) for c in caches)
    wanted = {a: asked(config, a) for a in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    return {"config": wanted, "evidence": sorted(sizes, key=str) if right else None}


def scales(nodes: Sequence[ir.Node], calls: Sequence[dict[str, Any]]) -> Feature | None:
    """The factor of the scores, as passed by the model and as attribute of each attention operator."""
    wanted = Counter(round(call["scale"], 6) for call in calls)
    got = Counter(round(a.as_float(), 6) for n in nodes if (a := n.attributes.get("scale")) is not None)
    if not wanted or not nodes:
        return None
    return {"config": sorted(wanted), "evidence": sorted(got) if set(got) <= set(wanted) else None}


def softcap(model: ir.Model, nodes: Sequence[ir.Node], config: Any, calls: Sequence[dict[str, Any]]) -> Feature | None:
    """Attributes of attention operators, or ``cap * tanh(x / cap)`` spelled out."""
    value = asked(config, "attn_logit_softcapping") or next((c["softcap"] for c in calls if c["softcap"]), None)
    if not value:
        return None
    attributes = sum(1 for n in nodes if (a := n.attributes.get("softcap")) is not None and close(a.as_float(), value))
    spelled = sum(close(cap, value) for cap in caps(model.graph.all_nodes()))
    enough = attributes + spelled >= max(1, sum(bool(c["softcap"]) for c in calls))
    return {"config": value, "evidence": {"attention": attributes, "Tanh": spelled} if enough else None}


def window(model: ir.Model, nodes: Sequence[ir.Node], config: Any) -> Feature | None:
    """Layers whose attention sees a window: an attribute, or a mask compared with that number.

    Where the config names the kind of every layer and each layer has one attention operator, the numbers must be equal.
    """
    value, kinds = window_of(config)
    if not value:
        return None
    attributes = sum(1 for n in nodes if (a := n.attributes.get("local_window_size")) is not None and a.as_int() == value)
    masks = sum(1 for n in nodes if _explicit_window(n) and value in compared(n.inputs[_MASK_INPUT[n.op_type]]))
    layers = attributes + masks
    if kinds and len([k for k in kinds if "attention" in k and "linear" not in k]) == len(nodes):
        right = layers == sum("sliding" in k or "chunked" in k for k in kinds)
    else:
        comparisons = [n for n in model.graph.all_nodes() if n.op_type in COMPARISONS]
        right = layers > 0 or any(value in compared(v) for n in comparisons for v in n.inputs)
    return {"config": value, "evidence": {"attributes": attributes, "masks": masks} if right else None}


def window_of(config: Any) -> tuple[int | None, list[str]]:
    """The window that some layer uses, and the kinds of the layers where the config lists them."""
    kinds = [str(kind) for kind in asked(config, "layer_types") or ()]
    if kinds and not any("sliding" in k or "chunked" in k for k in kinds):
        return None, kinds
    if asked(config, "use_sliding_window") is False:
        return None, kinds
    return asked(config, "sliding_window") or asked(config, "attention_chunk_size") or None, kinds


def _explicit_window(node: ir.Node) -> bool:
    index = _MASK_INPUT[node.op_type]
    return len(node.inputs) > index and node.inputs[index] is not None


def sinks(model: ir.Model, nodes: Sequence[ir.Node], calls: Sequence[dict[str, Any]]) -> Feature | None:
    """The operator's own input, or a column of scores joined before the softmax."""
    wanted = sum(call["sinks"] for call in calls)
    if not wanted:
        return None
    inputs = sum(1 for n in nodes if n.op_type == "GroupQueryAttention" and _has(n, _SINKS_INPUT))
    columns = sum(
        1
        for n in model.graph.all_nodes()
        if n.op_type == "Softmax" and n.inputs[0] is not None and _made_by(n.inputs[0], ("Cast", "CastLike")) == "Concat"
    )
    return {"config": f"{wanted} layers", "evidence": inputs + columns if inputs + columns >= wanted else None}


def qk_norms(nodes: Sequence[ir.Node], calls: Sequence[dict[str, Any]]) -> Feature | None:
    """Attention operators whose query meets a norm after its projection."""
    wanted = sum(call["qk_norms"] > 0 for call in calls)
    if not wanted or not nodes:
        return None
    got = sum(1 for n in nodes if n.inputs[0] is not None and any(m.op_type in NORMS for m in before_product(n.inputs[0])))
    return {"config": f"{wanted} layers", "evidence": got if got >= min(wanted, len(nodes)) else None}


# ---------------------------------------------------------------------------------------------------- rotary


def rotary(model: ir.Model, spec: GraphSpec, config: Any) -> Feature | None:
    """Tables of the fused rotary operators: their width against the cached heads, their angles against unscaled ones."""
    wanted = asked(config, "rope_parameters")
    tables = list(rotary_tables(model))
    own = sum(1 for n in model.graph.all_nodes() if n.op_type in ("Cos", "Sin"))
    if not wanted and not tables and not own:
        return None
    heads = {c.shape[3] for c in spec.caches if c.role == "key"}
    turned = sorted({2 * columns for _, columns in tables})
    evidence: dict[str, Any] = {"fused": len(tables), "rotated": turned, "heads": sorted(heads, key=str), "Cos": own}
    each = [wanted] if isinstance(wanted, dict) and "rope_type" in wanted else list((wanted or {}).values())
    each = [rope for rope in each if isinstance(rope, dict)]
    partial = any(0 < (rope.get("partial_rotary_factor") or 1.0) < 1 for rope in each)
    right = not (partial and tables and heads) or turned[0] < max(heads)  # type: ignore[type-var, operator]
    constants = list({id(t): t for t, _ in tables if t is not None}.values())
    if len(each) == 1 and each[0].get("rope_type") in _SCALED_ROPE and constants:
        evidence["scaled_tables"] = sum(not unscaled(*pair, each[0].get("rope_theta")) for pair in _pairs(constants))
        right = right and evidence["scaled_tables"] > 0
    return {"config": wanted, "evidence": evidence if right else None}


def rotary_tables(model: ir.Model) -> Iterator[tuple[ir.Value | None, int]]:
    """``(cosine table, its columns)`` of every fused rotary; the table is ``None`` where it is not a constant."""
    for node in model.graph.all_nodes():
        if node.op_type == "GroupQueryAttention" and (a := node.attributes.get("do_rotary")) is not None and a.as_int():
            cos = node.inputs[7]
        elif node.op_type == "RotaryEmbedding":
            cos = node.inputs[2 if node.domain else 1]
        else:
            continue
        if cos is not None and cos.shape is not None:
            yield (cos if cos.const_value is not None else None), int(cos.shape[-1])  # type: ignore[arg-type]


def _pairs(tables: Sequence[ir.Value]) -> Iterator[tuple[Any, Any]]:
    """The cosine tables' rows for position 1 with the matching sines."""
    for cos in tables:
        for use in cos.uses():
            sin = use.node.inputs[use.idx + 1]
            if sin is not None and sin.const_value is not None:
                assert cos.const_value is not None
                yield cos.const_value.numpy()[1], sin.const_value.numpy()[1]
                break


def unscaled(cos: Any, sin: Any, theta: float | None) -> bool:
    """Are these the angles of position 1 without scaling, ``theta ** (-2i / R)``?"""
    angles = np.arctan2(sin.astype(np.float64), cos.astype(np.float64))
    plain = (theta or 10000.0) ** (-np.arange(angles.size) / angles.size)
    return bool(np.allclose(angles, plain, rtol=2e-2, atol=1e-6))


# ---------------------------------------------------------------------------------------------------- experts, embeddings


def experts(model: ir.Model, config: Any, source: nn.Module) -> Feature | None:
    """Weights stacked by expert, as many in the graph as the model has. A config may count experts no layer has."""
    count = next((n for a in _EXPERTS if isinstance(n := asked(config, a), int) and n > 0), 0)
    wanted = expert_tensors(source, count)
    if not wanted:
        return None
    shapes = [v.const_value.shape for v in model.graph.initializers.values() if v.const_value is not None]
    stacked = sum(1 for s in shapes if len(s) >= 3 and s[0] == count)
    operators = Counter(n.op_type for n in model.graph.all_nodes() if n.op_type in ("MoE", "QMoE", "TopK"))
    evidence = {**operators, "weights": stacked} if stacked >= wanted else None
    return {"config": count, "evidence": evidence}


def expert_tensors(source: nn.Module, count: int) -> int:
    """Matrices stacked ``[count, rows, columns]`` that the model holds."""
    ours = (ExportExperts, ExportLinear, ExportQuantLinear, ExportQuantEmbedding)
    return sum(
        1
        for module in source.modules()
        if not isinstance(module, ours)
        for tensor in module.parameters(recurse=False)
        if tensor.dim() == 3 and tensor.shape[0] == count and min(tensor.shape[1:]) > 1
    )


def tied(model: ir.Model, source: Any) -> Feature:
    """One tensor for embedding and head; a quantized one is written twice where the standard has no operator for both."""
    embedding, head = source.get_input_embeddings(), source.get_output_embeddings()
    head = getattr(head, "head", head)
    same = any(
        getattr(embedding, name, None) is not None and getattr(embedding, name) is getattr(head, name, None)
        for name in ("weight", "weight_packed")
    )
    shared = sum(1 for v in model.graph.initializers.values() if _looked_up_and_multiplied(v))
    copies = same and isinstance(head, ExportQuantLinear) and not any(n.op_type == "MatMulNBits" for n in model.graph)
    evidence: dict[str, Any] | None = {"shared_tensors": shared}
    if same and not shared:
        evidence = {"shared_tensors": 0, "copies": 2} if copies else None
    return {"config": same, "evidence": evidence}


def _looked_up_and_multiplied(value: ir.Value) -> bool:
    """Is the constant both an embedding table and a matrix?"""
    kinds = {use.node.op_type for use in value.uses()}
    return bool(kinds & {"Gather", "GatherBlockQuantized"}) and bool(kinds - {"Gather", "GatherBlockQuantized"})


# ---------------------------------------------------------------------------------------------------- logits


def logit_features(model: ir.Model, config: Any) -> dict[str, Feature | None]:
    """Factors and the cap between the head's product and the logits."""
    logits = next(value for value in model.graph.outputs if value.name == LOGITS)
    between = list(before_product(logits))
    constants = {abs(c) for node in between if node.op_type in ("Mul", "Div") for v in node.inputs if (c := scalar(v))}
    found: dict[str, Feature | None] = {}
    for name in _FACTORS:
        value = asked(config, name)
        if isinstance(value, int | float) and value not in (0, 1):
            right = any(close(c, value) or close(c, 1 / value) for c in constants)
            found[name] = {"config": value, "evidence": sorted(constants) if right else None}
    if cap := asked(config, "final_logit_softcapping"):
        values = caps(between)
        found["final_softcap"] = {"config": cap, "evidence": values if any(close(c, cap) for c in values) else None}
    return found


def caps(nodes: Any) -> list[float]:
    """Every ``cap`` of a ``cap * tanh(x / cap)``."""
    found = []
    for node in nodes:
        if node.op_type != "Tanh":
            continue
        after = [use.node for use in node.outputs[0].uses() if use.node.op_type == "Mul"]
        maker = node.inputs[0].producer()
        if maker is None or maker.op_type not in ("Div", "Mul"):
            continue
        inner = [c for v in maker.inputs if (c := scalar(v))]
        outer = [c for n in after for v in n.inputs if (c := scalar(v))]
        for c in outer:
            if any(close(c, i if maker.op_type == "Div" else 1 / i) for i in inner):
                found.append(c)
    return found


# ---------------------------------------------------------------------------------------------------- walking the graph


def asked(config: Any, name: str) -> Any:
    """An attribute of the config; where transformers refuses it because it differs by layer, the first layer's."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return getattr(config.per_layer_config[0], name, None)


def close(a: float, b: float) -> bool:
    """Equal but for float16 rounding."""
    return abs(a - b) <= 2e-3 * max(abs(a), abs(b))


def scalar(value: ir.Value | None) -> float | None:
    """The number, of a constant of one element."""
    if value is None or value.const_value is None or any(n != 1 for n in value.const_value.shape):
        return None
    return float(value.const_value.numpy().reshape(-1)[0])


def compared(value: ir.Value | None) -> set[int]:
    """Whole numbers added to, subtracted from or dividing what a mask is made of."""
    found: set[int] = set()
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        current = waiting.pop()
        node = None if current is None else current.producer()
        if node is None or id(node) in seen or node.op_type in (*PRODUCTS, *NORMS, *ATTENTION):
            continue
        seen.add(id(node))
        if node.op_type in ("Add", "Sub", "Div", "Mod", *COMPARISONS):
            found |= {int(abs(c)) for v in node.inputs if (c := scalar(v)) is not None and c == int(c)}
        waiting += list(node.inputs)
    return found


def before_product(value: ir.Value) -> Iterator[ir.Node]:
    """The nodes a value comes from, back to the last matrix products."""
    seen: set[int] = set()
    waiting: list[ir.Value | None] = [value]
    while waiting:
        current = waiting.pop()
        node = None if current is None else current.producer()
        if node is None or id(node) in seen or node.op_type in PRODUCTS:
            continue
        seen.add(id(node))
        yield node
        waiting += list(node.inputs)


def _has(node: ir.Node, index: int) -> bool:
    return len(node.inputs) > index and node.inputs[index] is not None


def _made_by(value: ir.Value, through: tuple[str, ...]) -> str | None:
    """Type of the operator that makes a value, looking through some."""
    node = value.producer()
    while node is not None and node.op_type in through and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return None if node is None else node.op_type
