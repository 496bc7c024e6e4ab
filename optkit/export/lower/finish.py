"""From torch.onnx's model to the written file: real weights behind the initializers, clean-ups, external data.

Every initializer is external, in one ``<name>.data`` file written tensor by tensor, so neither the graph file nor memory ever
holds the weights: protobuf's 2 GB limit cannot be met, and peak memory is the largest tensor.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from onnx_ir.passes import common
from onnxscript import optimizer

from optkit.errors import VerificationError
from optkit.export.lower import bfloat16, int8, passes, portable
from optkit.export.weights import Weights
from optkit.io_spec import GraphSpec

_FOLD_BYTES = 1024  # constants up to this size are folded; weights never are


def attach_weights(model: ir.Model, weights: Weights) -> dict[str, str]:
    """Puts readers behind the initializers that stand for hollow tensors; returns initializer -> identity of its data.

    Raises:
        VerificationError: an initializer without data.
    """
    source: dict[str, str] = {}
    for name, value in model.graph.initializers.items():
        raw = getattr(value.const_value, "raw", None)
        if not isinstance(raw, torch.Tensor):
            continue
        if raw.is_meta:
            raise VerificationError(f"initializer {name} has no data: the exporter lost track of a weight")
        if raw.numel() == 0:
            continue
        source[name] = f"{raw.data_ptr()}:{raw.dtype}:{tuple(raw.shape)}"
        hollow = weights.find(raw)
        if hollow is not None:
            read = hollow.read
            value.const_value = ir.LazyTensor(
                lambda r=read, n=name: tensor_adapters.TorchTensor(r().contiguous(), name=n),  # type: ignore[misc]
                dtype=tensor_adapters.from_torch_dtype(raw.dtype),
                shape=ir.Shape(list(raw.shape)),
                name=name,
            )
            weights.consumed.add(hollow.name)
    return source


def fold(model: ir.Model) -> None:
    """Shape arithmetic and small constants computed now; duplicates merged; unused nodes dropped."""
    optimizer.fold_constants(model, input_size_limit=_FOLD_BYTES, output_size_limit=_FOLD_BYTES)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.DeduplicateInitializersPass(size_limit=_FOLD_BYTES)(model)
    passes.tidy(model)


def save(model: ir.Model, path: Path) -> None:
    """Writes ``path`` and ``path.data``; tensors are made one at a time."""
    ir.save(model, path, external_data=path.name + ".data", size_threshold_bytes=_FOLD_BYTES)


def save_sharing(model: ir.Model, path: Path, other: Path) -> None:
    """Writes ``path`` with its tensors taken from the data file of ``other``, a graph of the same model.

    Raises:
        VerificationError: a tensor of weight size that ``other`` does not have.
    """
    stored = {name: v.const_value for name, v in ir.load(other).graph.initializers.items()}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.nbytes <= _FOLD_BYTES:
            continue
        same = stored.get(name)
        if not isinstance(same, ir.ExternalTensor) or same.dtype != tensor.dtype or same.shape != tensor.shape:
            raise VerificationError(
                f"{path.name}: {name} is not among the tensors of {other.name}, so weights cannot be shared"
            )
        value.const_value = ir.ExternalTensor(
            same.location, same.offset, same.length, same.dtype, shape=same.shape, name=name, base_dir=path.parent
        )
    ir.save(model, path)


def start(model: ir.Model, spec: GraphSpec, weights: Weights) -> set[str]:
    """What every target begins with; returns the initializers that stand for shared data."""
    source = attach_weights(model, weights)
    tied = {name for name in source if list(source.values()).count(source[name]) > 1}
    passes.share_tensors(model.graph, source)
    passes.name_interface(model, spec)
    fold(model)
    if spec.logits_dtype != "bfloat16":
        bfloat16.compute_in_float32(model.graph)
    return tied


def finish_ort(model: ir.Model, spec: GraphSpec, weights: Weights) -> ir.Model:
    """The clean-ups of target ``ort`` in their order."""
    passes.move_simplified_norm(model)
    tied = start(model, spec, weights)
    passes.legal_blocks(model.graph)
    passes.transpose_linears(model.graph, tied)
    passes.spread_zero_points(model.graph)
    cancel(model)
    passes.fuse_skip_norms(model.graph)
    passes.pack_siblings(model.graph)
    if int8.expand_linears(model.graph, wide=True):
        int8.explicit_zero_points(model.graph)
    return end(model)


def finish_standard(model: ir.Model, spec: GraphSpec, weights: Weights, symmetric_only: bool) -> ir.Model:
    """The clean-ups of the targets in standard operators."""
    tied = start(model, spec, weights)
    cancel(model)
    portable.restore_tables(model.graph)
    portable.transpose_constants(model.graph, tied)
    passes.pack_siblings(model.graph)
    expanded = int8.expand_linears(model.graph, wide=spec.layout != "scatter")
    portable.spread_gathered_zero_points(model.graph, portable.gathered_groups(model.graph))
    portable.standard_quantized_linears(model.graph, symmetric_only)
    if expanded:
        int8.explicit_zero_points(model.graph)
    return end(model, required_positions=spec.layout == "scatter")


def cancel(model: ir.Model) -> None:
    passes.cancel_transposes(model.graph)
    common.RemoveUnusedNodesPass()(model)
    passes.cancel_reshapes(model.graph)
    common.RemoveUnusedNodesPass()(model)


def end(model: ir.Model, required_positions: bool = False) -> ir.Model:
    """``required_positions``: no default for ``logits_positions`` (TensorRT would make an input with a default a constant)."""
    passes.tidy(model)
    if not required_positions:
        passes.default_logits_positions(model)
    if any(node.domain == "com.microsoft" for node in model.graph.all_nodes()):
        model.opset_imports["com.microsoft"] = 1
    else:
        model.opset_imports.pop("com.microsoft", None)
    return model
