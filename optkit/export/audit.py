"""What the written graph holds, against what the checkpoint and its config say it must hold.

* every tensor of the checkpoint went into the graph, or is named as ignored;
* each feature of the config that changes the numbers leaves its trace in the graph;
* which tier captured each layer (hooks.py), and what the probes decided;
* floating-point tensors of another type than asked for ("islands");
* bytes of the graph's tensors against the checkpoint's.

Numbers are judged by verify.py and ``optkit validate``; the audit says where to look. It raises only where the graph
contradicts the config: wrong KV heads or head size, or a cap, sink or expert that vanished.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from optkit.checkpoint.model import Checkpoint
from optkit.errors import VerificationError
from optkit.export.features import ATTENTION, PRODUCTS, features, rotary_tables
from optkit.export.trace import Prepared
from optkit.export.weights import Weights

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
_ISLAND_BYTES = 4096  # smaller floating-point constants are arithmetic, not weights
_SUMS = ("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2", "CumSum", "Pow", "Exp")
SIZE_LIMIT = 1.02  # of the checkpoint's tensors in the graph's types
SMALL_BYTES = 4096  # shapes, indices, constants


def audit(model: ir.Model, checkpoint: Checkpoint, prepared: Prepared) -> dict[str, Any]:
    """The audit of a finished graph, as written into the manifest.

    Raises:
        VerificationError: a feature of the config has no trace in the graph, or the caches have other sizes.
    """
    spec, weights = prepared.spec, prepared.weights
    ignored = sorted(set(weights.names()) - weights.consumed)
    found: dict[str, Any] = {
        "tensors": {
            "in_graph": len(weights.consumed),
            "not_read_by_forward": ignored,
            "not_of_the_model": checkpoint.unused_tensors(),
        },
        "features": features(model, spec, checkpoint.config, prepared.wrapper.model, prepared.calls),
        "tiers": prepared.facts["tiers"],
        "nodes": dict(Counter(node.op_type for node in model.graph.all_nodes()).most_common()),
        "islands": islands(model, spec.logits_dtype),
        "bytes": sizes(model, checkpoint, weights),
    }
    missing = [f"{name} ({feature['config']})" for name, feature in found["features"].items() if feature["evidence"] is None]
    if missing:
        raise VerificationError(
            f"the config asks for {', '.join(missing)}, and nothing in the graph does it; nothing was written"
        )
    return found


def islands(model: ir.Model, dtype: str) -> dict[str, Any]:
    """Where the graph leaves its own floating-point type.

    ``tensors``: constants of weight size of another type. ``products``: products and attention that compute in another
    type. ``casts``: how many, by type. ``sums``: sums of squares or exponentials in a 16-bit type, which overflows first.
    """
    wanted = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}[dtype]
    others = [
        name
        for name, v in model.graph.initializers.items()
        if v.const_value is not None and v.dtype in _FLOATS and v.dtype != wanted and v.const_value.nbytes > _ISLAND_BYTES
    ]
    nodes = list(model.graph.all_nodes())

    def of(kinds: tuple[str, ...], types: tuple[ir.DataType, ...]) -> dict[str, int]:
        return dict(Counter(n.op_type for n in nodes if n.op_type in kinds and n.outputs[0].dtype in types))

    casts = Counter(str(ir.DataType(n.attributes["to"].as_int())) for n in nodes if n.op_type == "Cast")
    return {
        "tensors": others,
        "products": of((*PRODUCTS, *ATTENTION), tuple(t for t in _FLOATS if t != wanted)),
        "casts": dict(casts),
        "sums": of(_SUMS, (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)),
    }


def sizes(model: ir.Model, checkpoint: Checkpoint, weights: Weights) -> dict[str, Any]:
    """Bytes of the graph's tensors against the checkpoint's tensors in the same types; rotary tables and the boolean mask
    tables of a model's own attention code, which no checkpoint holds, are counted apart, each mask once. ``within_limit``: at
    most 2 % more."""
    tensors = {id(v): v.const_value for v in model.graph.initializers.values() if v.const_value is not None}
    tables = {id(cos): cos.const_value for cos, _ in rotary_tables(model) if cos is not None}
    graph, made = (sum(t.nbytes for t in some.values() if t is not None) for some in (tensors, tables))
    masks = sum({t.tobytes(): t.nbytes for t in tensors.values() if t is not None and is_mask(t)}.values())
    expected = weights.nbytes()
    return {
        "graph": graph,
        "rotary_tables": 2 * made,
        "mask_tables": masks,
        "weights": expected,
        "checkpoint": checkpoint_bytes(checkpoint),
        "within_limit": graph - 2 * made - masks <= SIZE_LIMIT * expected + SMALL_BYTES,
    }


def is_mask(tensor: ir.TensorProtocol) -> bool:
    """A table of which position sees which: boolean, square, and nobody sees what comes after it."""
    if tensor.dtype != ir.DataType.BOOL or len(tensor.shape) < 2 or tensor.shape[-1] != tensor.shape[-2]:
        return False
    return not np.triu(tensor.numpy(), 1).any()


def checkpoint_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the checkpoint's weight files."""
    files = [*Path(checkpoint.directory).glob("*.safetensors")]
    return sum(path.stat().st_size for path in files)
