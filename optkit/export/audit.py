"""What the written graph holds, against what the checkpoint and its config say it must hold.

* every tensor of the checkpoint went into the graph, or is named as ignored;
* each feature of the config that changes the numbers leaves its trace in the graph;
* which tier captured each layer (hooks.py), and what the probes decided;
* floating-point tensors of another type than asked for ("islands");
* bytes of the graph's tensors against the checkpoint's.

Numbers are judged by verify.py and ``optkit validate``; the audit says where to look. It raises only where the graph
contradicts the
config: wrong KV heads or head size, or a cap, sink or expert that vanished.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir

from optkit.checkpoint.model import Checkpoint
from optkit.errors import VerificationError
from optkit.export.weights import Weights
from optkit.io_spec import GraphSpec

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
_ISLAND_BYTES = 4096  # smaller floating-point constants are arithmetic, not weights


def audit(model: ir.Model, spec: GraphSpec, checkpoint: Checkpoint, weights: Weights, facts: dict[str, Any]) -> dict[str, Any]:
    """The audit of a finished graph, as written into the manifest.

    Raises:
        VerificationError: a feature of the config has no trace in the graph, or the caches have other sizes.
    """
    ignored = sorted(set(weights.names()) - weights.consumed)
    found: dict[str, Any] = {
        "tensors": {
            "in_graph": len(weights.consumed),
            "not_read_by_forward": ignored,
            "not_of_the_model": checkpoint.unused_tensors(),
        },
        "features": features(model, spec, checkpoint.config, any("expert" in name for name in weights.names())),
        "tiers": facts.get("tiers"),
        "nodes": dict(Counter(node.op_type for node in model.graph.all_nodes()).most_common()),
        "islands": islands(model, spec.logits_dtype),
        "bytes": {"graph": graph_bytes(model), "checkpoint": checkpoint_bytes(checkpoint)},
    }
    missing = [f"{name} ({feature['config']})" for name, feature in found["features"].items() if feature["evidence"] is None]
    if missing:
        raise VerificationError(
            f"the config asks for {', '.join(missing)}, and nothing in the graph does it; nothing was written"
        )
    return found


def features(model: ir.Model, spec: GraphSpec, config: Any, has_experts: bool) -> dict[str, dict[str, Any]]:
    """Feature -> what the config says and what in the graph shows it (``None``: nothing does).

    Configurations give a number of experts even where no layer has any, so ``has_experts`` says whether the model does.
    """
    kinds = Counter(node.op_type for node in model.graph.all_nodes())
    attention = [node for node in model.graph.all_nodes() if node.op_type in ("GroupQueryAttention", "Attention")]
    out: dict[str, dict[str, Any]] = {}

    def expect(name: str, asked: Any, evidence: Any) -> None:
        if asked:
            out[name] = {"config": asked, "evidence": evidence or None}

    keys = [c for c in spec.caches if c.role == "key"]
    if keys:
        shapes = sorted({(c.shape[1], c.shape[-1]) for c in keys}, key=str)
        out["kv_heads_and_size"] = {"config": _kv(config), "evidence": shapes}
    capped = sum(1 for n in attention if (a := n.attributes.get("softcap")) is not None and a.as_float() > 0)
    expect(
        "attention_softcap",
        _asked(config, "attn_logit_softcapping"),
        {"attention": capped, "Tanh": kinds["Tanh"]} if capped or kinds["Tanh"] else None,
    )
    expect("final_softcap", _asked(config, "final_logit_softcapping"), {"Tanh": kinds["Tanh"]} if kinds["Tanh"] else None)
    windows = sorted(
        {a.as_int() for n in attention if (a := n.attributes.get("local_window_size")) is not None and a.as_int() > 0}
    )
    masks = kinds["LessOrEqual"] + kinds["Less"] + kinds["Greater"] + kinds["GreaterOrEqual"]
    expect("window", _window(config), {"attribute": windows, "mask_comparisons": masks} if windows or masks else None)
    experts = {k: kinds[k] for k in ("MoE", "QMoE", "TopK") if kinds[k]}
    expect(
        "experts",
        next(
            (v for a in ("num_local_experts", "num_experts", "n_routed_experts") if has_experts and (v := _asked(config, a))),
            None,
        ),
        experts,
    )
    sinks = sum(1 for n in attention if n.op_type == "GroupQueryAttention" and len(n.inputs) > 11 and n.inputs[11] is not None)
    rotary = (
        sum(1 for n in attention if (a := n.attributes.get("do_rotary")) is not None and a.as_int()) + kinds["RotaryEmbedding"]
    )
    out["rotary"] = {"config": _asked(config, "rope_parameters"), "evidence": {"fused": rotary, "Cos": kinds["Cos"]}}
    if sinks:
        out["sinks"] = {"config": "attention sinks", "evidence": sinks}
    tied = sum(1 for v in model.graph.initializers.values() if _looked_up_and_multiplied(v))
    out["tied_embeddings"] = {
        "config": bool(getattr(config, "tie_word_embeddings", False)),
        "evidence": {"shared_tensors": tied},
    }
    return out


def _looked_up_and_multiplied(value: ir.Value) -> bool:
    """Is the constant both an embedding table and a matrix?"""
    kinds = {use.node.op_type for use in value.uses()}
    return bool(kinds & {"Gather", "GatherBlockQuantized"}) and bool(kinds - {"Gather", "GatherBlockQuantized"})


def _kv(config: Any) -> dict[str, Any]:
    return {a: _asked(config, a) for a in ("num_attention_heads", "num_key_value_heads", "head_dim")}


def _asked(config: Any, name: str) -> Any:
    """An attribute of the config; where transformers refuses it because it differs by layer, the first layer's."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return getattr(config.per_layer_config[0], name, None)


def _window(config: Any) -> Any:
    """The window, if some layer uses it."""
    kinds = getattr(config, "layer_types", None)
    used = kinds is None or any("sliding" in str(kind) or "chunked" in str(kind) for kind in kinds)
    return _asked(config, "sliding_window") if used and getattr(config, "use_sliding_window", True) else None


def islands(model: ir.Model, dtype: str) -> dict[str, Any]:
    """Floating-point tensors of weight size whose type is not the graph's."""
    wanted = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}[dtype]
    others = [
        name
        for name, v in model.graph.initializers.items()
        if v.const_value is not None and v.dtype in _FLOATS and v.dtype != wanted and v.const_value.nbytes > _ISLAND_BYTES
    ]
    casts = Counter(str(ir.DataType(n.attributes["to"].as_int())) for n in model.graph.all_nodes() if n.op_type == "Cast")
    return {"tensors": others, "casts": dict(casts)}


def graph_bytes(model: ir.Model) -> int:
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)


def checkpoint_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the checkpoint's weight files."""
    files = [*Path(checkpoint.directory).glob("*.safetensors")]
    return sum(path.stat().st_size for path in files)
