"""The lowered forms of recurrences, convolutions and other odd operators, one at a time in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from optkit.export import state_ops  # noqa: F401
from optkit.export.lower.bfloat16 import compute_in_float32
from optkit.export.lower.onnx import OnnxTable
from optkit.export.lower.ort import OrtTable
from optkit.export.lower.translate import translate

TABLES = {"ort": OrtTable, "onnx": OnnxTable}


class Recurrence(nn.Module):
    def __init__(self, delta: bool) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Any:
        return torch.ops.optkit.linear_attention(q, k, v, decay, beta if self.delta else None, state, 0.3)


class Convolution(nn.Module):
    def __init__(self, silu: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.silu = silu
        self.weight = nn.Parameter(torch.randn(6, 4, generator=generator))
        self.bias = nn.Parameter(torch.randn(6, generator=generator))

    def forward(self, x: Tensor, past: Tensor) -> Any:
        return torch.ops.optkit.causal_conv(x, past, self.weight, self.bias, self.silu)


class InverseError(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.erfinv(x)


def lowered(
    module: nn.Module, target: str, inputs: dict[str, Tensor], axes: dict[str, dict[int, Any]], outputs: list[str]
) -> ir.Model:
    with torch.no_grad():
        program = torch.export.export(module.eval(), tuple(inputs.values()), dynamic_shapes=tuple(axes.values()), strict=False)
    model = translate(program, TABLES[target](24, "slots", 1).table(), 24, list(inputs), outputs)
    if any(node.domain == "com.microsoft" for node in model.graph):
        model.opset_imports["com.microsoft"] = 1
    return model


def run(model: ir.Model, path: Path, inputs: dict[str, Tensor]) -> list[np.ndarray]:
    ir.save(model, path / "m.onnx")
    session = onnxruntime.InferenceSession(path / "m.onnx", providers=["CPUExecutionProvider"])
    wanted = {i.name for i in session.get_inputs()}
    return session.run(None, {name: tensor.numpy() for name, tensor in inputs.items() if name in wanted})


def recurrence_inputs(batch: int, new: int, groups: int, per_key: bool) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(batch + new)
    shape = (batch, new, 4, 8) if per_key else (batch, new, 4)
    return {
        "q": torch.randn(batch, new, groups, 8, generator=g),
        "k": 0.3 * torch.randn(batch, new, groups, 8, generator=g),
        "v": torch.randn(batch, new, 4, 6, generator=g),
        "decay": -torch.rand(shape, generator=g),
        "beta": torch.rand(batch, new, 4, generator=g),
        "state": torch.randn(batch, 4, 8, 6, generator=g),
    }


@pytest.mark.parametrize("target", ["ort", "onnx"])
@pytest.mark.parametrize(("delta", "per_key", "groups"), [(True, False, 4), (False, False, 2), (False, True, 1)])
def test_a_recurrence_is_lowered_exactly(target: str, delta: bool, per_key: bool, groups: int, tmp_path: Path) -> None:
    dim = torch.export.Dim.DYNAMIC
    sample = recurrence_inputs(2, 3, groups, per_key)
    axes = {name: {0: dim} if name == "state" else {0: dim, 1: dim} for name in sample}
    model = lowered(Recurrence(delta), target, sample, axes, ["out", "final"])
    domains = {node.domain for node in model.graph}
    assert domains == ({"", "com.microsoft"} if target == "ort" else {""})
    for batch, new in ((3, 7), (1, 1)):
        inputs = recurrence_inputs(batch, new, groups, per_key)
        want = Recurrence(delta)(*inputs.values())
        for got, expected in zip(run(model, tmp_path, inputs), want, strict=True):
            np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("target", ["ort", "onnx"])
@pytest.mark.parametrize("silu", [False, True])
def test_a_convolution_is_lowered_exactly(target: str, silu: bool, tmp_path: Path) -> None:
    dim, module = torch.export.Dim.DYNAMIC, Convolution(silu)
    axes = {"x": {0: dim, 2: dim}, "past": {0: dim}}
    model = lowered(module, target, {"x": torch.randn(2, 6, 5), "past": torch.randn(2, 6, 3)}, axes, ["y"])
    for batch, new in ((3, 2), (1, 1)):
        inputs = {"x": torch.randn(batch, 6, new), "past": torch.randn(batch, 6, 3)}
        with torch.no_grad():
            np.testing.assert_allclose(run(model, tmp_path, inputs)[0], module(*inputs.values()), atol=1e-5)


def test_the_inverse_error_function_has_float32_accuracy(tmp_path: Path) -> None:
    x = torch.linspace(-0.99999, 0.99999, 2001)
    model = lowered(InverseError(), "onnx", {"x": x}, {"x": {0: torch.export.Dim.DYNAMIC}}, ["y"])
    want = torch.erfinv(x.double()).numpy()
    np.testing.assert_allclose(run(model, tmp_path, {"x": x})[0], want, rtol=2e-5, atol=1e-7)


def test_bfloat16_arithmetic_runs_and_still_rounds(tmp_path: Path) -> None:
    value = lambda name, kind: onnx.helper.make_tensor_value_info(name, kind, [4])  # noqa: E731
    nodes = [
        onnx.helper.make_node("Cast", ["x"], ["narrow"], to=onnx.TensorProto.BFLOAT16),
        onnx.helper.make_node("Mul", ["narrow", "narrow"], ["square"]),
        onnx.helper.make_node("Cast", ["square"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    graph = onnx.helper.make_graph(nodes, "g", [value("x", onnx.TensorProto.FLOAT)], [value("y", onnx.TensorProto.FLOAT)])
    graph.value_info.extend(value(name, onnx.TensorProto.BFLOAT16) for name in ("narrow", "square"))
    model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 24)], ir_version=10))
    assert compute_in_float32(model.graph) == 1
    x = torch.tensor([1.003, 2.7, -0.11, 5.55])
    want = (x.bfloat16() * x.bfloat16()).float().numpy()
    np.testing.assert_array_equal(run(model, tmp_path, {"x": x})[0], want)
