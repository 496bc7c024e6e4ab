"""Judging a graph that rounds activations to int8.

A difference in the last digit of an activation can move its int8 code by one, and the next layers then round other numbers:
two correct programs differ by about what the rounding itself costs. So the export is judged in two steps that are sharp:

1. everything but the rounding: the graph with the rounding of activations taken out (:func:`bypass`) against the model computed
   without it, to the same tolerance as any other graph;
2. the rounding: in the graph as it is, every linear's output against the checkpoint's formula
   (:func:`optkit.checkpoint.affine.fake_quantize_inputs`) applied to the very input that the graph gave the linear
   (:func:`check`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.external_data_helper
import onnxruntime
import torch
from onnx import numpy_helper
from torch import nn

from optkit.checkpoint.affine import fake_quantize_inputs
from optkit.checkpoint.quant_linear import QuantLinear
from optkit.errors import VerificationError
from optkit.io_spec import EXACT_INT8

STEP = 1e-5  # of the largest output of a linear; float32 sums in another order give about 1e-6
STEP_FLOAT16 = 2e-2
# A code may still fall on the other side of a tie when x / scale is computed in another way; so many outputs may differ more.
OUTLIERS = 0.02


@contextlib.contextmanager
def unrounded(model: nn.Module) -> Iterator[None]:
    """In the block the model's linears do not round their inputs to int8."""
    found = [module for module in model.modules() if isinstance(module, QuantLinear)]
    for module in found:
        module.rounds_inputs = False
    try:
        yield
    finally:
        for module in found:
            module.rounds_inputs = True


@dataclass
class Rounded:
    """A ``DequantizeLinear(QuantizeLinear(x))`` of activations in a graph."""

    quantize: onnx.NodeProto
    restore: onnx.NodeProto


def rounded_activations(model: onnx.ModelProto) -> list[Rounded]:
    """Every place where activations are rounded and used right away (a cache of codes is another thing)."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    found = []
    for node in model.graph.node:
        users = readers.get(node.output[0], []) if node.op_type == "QuantizeLinear" else []
        if users and all(user.op_type == "DequantizeLinear" for user in users):
            found += [Rounded(node, user) for user in users]
    return found


def bypass(model: onnx.ModelProto) -> int:
    """Takes the rounding of activations out; returns how many places had it."""
    found = rounded_activations(model)
    for place in found:
        place.restore.op_type = "Identity"
        place.restore.ClearField("attribute")
        del place.restore.input[:]
        place.restore.input.append(place.quantize.input[0])
    return len(found)


def check(path: Path, feeds: dict[str, np.ndarray], scales: Iterable[float]) -> dict[str, Any] | None:
    """Every linear of the written graph that rounds its input, on what the graph computes for ``feeds``.

    Args:
        path: the graph.
        feeds: inputs of one run.
        scales: the static scales of the checkpoint.

    Returns:
        ``linears`` and ``error`` (the largest median error of a linear over its largest output); ``None`` if nothing is
        rounded.

    Raises:
        VerificationError: a linear does not compute what the checkpoint says, or the graph has other static scales.
    """
    model = onnx.load(str(path), load_external_data=False)
    linears = _linears(model, path.parent)
    if not linears:
        return None
    names = sorted({name for linear in linears for name in (linear.source, linear.output)})
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    options.add_session_config_entry(*EXACT_INT8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = dict(zip(names, session.run(names, feeds), strict=True))
    wanted = {np.float32(scale) for scale in scales}
    worst = 0.0
    for linear in linears:
        if linear.scale is not None and not any(np.isclose(linear.scale, w, rtol=1e-3) for w in wanted):
            raise VerificationError(
                f"{linear.output}: rounds with the scale {linear.scale}, which no linear of the checkpoint has"
            )
        worst = max(worst, _error(linear, values[linear.source], values[linear.output]))
    return {"linears": len(linears), "error": worst}


@dataclass
class _Linear:
    source: str  # the value that is rounded
    output: str
    scale: np.float32 | None  # static, or by token
    weight: Callable[[], np.ndarray]  # [I, O]


def _error(linear: _Linear, x: np.ndarray, y: np.ndarray) -> float:
    """The median error, over the largest output; raises where too many are larger than they may be."""
    scale = None if linear.scale is None else torch.tensor(linear.scale)
    rounded = fake_quantize_inputs(torch.from_numpy(x.astype(np.float32)), scale).double().numpy()
    want = rounded @ linear.weight()
    size = float(np.abs(want).max()) or 1.0
    errors = np.abs(y.astype(np.float64) - want) / size
    limit = STEP if y.dtype == np.float32 else STEP_FLOAT16
    rows = (errors > limit).any(-1)  # a tie that fell differently is seen in the whole row
    if not np.isfinite(errors).all() or float(rows.mean()) > 0.5 or float(np.median(errors)) > limit:
        raise VerificationError(
            f"{linear.output}: a linear with 8-bit activations differs from the checkpoint's by {float(np.median(errors)):.1e} "
            f"of its largest output (limit {limit:.0e}); nothing was written"
        )
    return float(np.median(errors))


def _linears(model: onnx.ModelProto, folder: Path) -> list[_Linear]:
    made = {name: node for node in model.graph.node for name in node.output}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def number(name: str) -> np.ndarray:
        tensor = constants[name]
        if onnx.external_data_helper.uses_external_data(tensor):
            tensor = onnx.TensorProto.FromString(tensor.SerializeToString())
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
        return numpy_helper.to_array(tensor)

    found = []
    for place in rounded_activations(model):
        divided = made.get(place.quantize.input[0])
        by_token = divided is not None and divided.op_type == "Div" and divided.input[1] in made
        source = divided.input[0] if by_token and divided is not None else place.quantize.input[0]
        for product in readers.get(place.restore.output[0], []):
            restored = made.get(product.input[1]) if product.op_type == "MatMul" else None
            if restored is None or restored.op_type != "DequantizeLinear":
                raise VerificationError(f"{product.name}: reads rounded activations and is no linear of the checkpoint")
            scaled = readers[product.output[0]] if by_token else []
            if by_token and [node.op_type for node in scaled] != ["Mul"]:
                raise VerificationError(f"{product.name}: the scale per token is not multiplied back")
            codes, scales = restored.input[:2]

            def weight(codes: str = codes, scales: str = scales) -> np.ndarray:
                return number(codes).astype(np.float64) * number(scales).astype(np.float64)

            output = scaled[0].output[0] if by_token else product.output[0]
            scale = None if by_token else np.float32(number(place.quantize.input[1]))
            found.append(_Linear(source, output, scale, weight))
    return found
