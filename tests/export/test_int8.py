"""Linears with 8-bit activations on every target: what is written is what the checkpoint says, also on CPUs without VNNI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from optkit import manifest
from optkit.errors import InputError, UnsupportedError
from optkit.export.run import export
from optkit.io_spec import EXACT_INT8
from optkit.quantize.run import quantize
from optkit.quantize.smoothquant import SmoothQuant
from optkit.quantize.statistics import Statistics
from optkit.scheme import QuantScheme
from optkit.validate.sides import opened
from tests import tiny

CALIBRATION = {"source": "self", "samples": 4, "length": 48}


@pytest.fixture(scope="module", params=["static", "dynamic"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, Path]:
    directory = tmp_path_factory.mktemp(request.param)
    recipe: dict[str, Any] = {"scheme": "w8a8", "method": "smoothquant", "calibration": CALIBRATION}
    static = request.param == "static"
    source = tiny.save("llama", directory / "hf")
    return static, quantize(source, out_dir=directory / "w8a8", dynamic_activations=not static, **recipe)


@pytest.mark.parametrize("target", ["ort", "onnx", "tensorrt"])
def test_the_graph_computes_what_the_checkpoint_says(checkpoint: tuple[bool, Path], target: str, tmp_path: Path) -> None:
    static, source = checkpoint
    if target == "tensorrt" and not static:
        with pytest.raises(UnsupportedError, match="dynamic_activations: false"):
            export(source, out_dir=tmp_path / "out", target=target, dtype="fp32")
        return
    out = export(source, out_dir=tmp_path / "out", target=target, dtype="fp32")
    facts = manifest.read_manifest(out).facts
    linears = 8 if static else 9  # siblings are one, and a static head is not calibrated
    assert facts["verified"]["int8_activations"]["linears"] == linears
    assert facts["graph"]["int8_activations"]
    graph = onnx.load(str(out / "model.onnx"), load_external_data=False).graph
    constants = {tensor.name: tensor.data_type for tensor in graph.initializer}
    weights = [n for n in graph.node if n.op_type == "DequantizeLinear" and constants.get(n.input[0]) == onnx.TensorProto.INT8]
    assert weights
    assert all(len(n.input) == 3 for n in weights), "ONNX Runtime spoils int8 weights without zero points on CPUs without VNNI"
    if target == "ort":
        name, value = EXACT_INT8
        assert json.loads((out / "genai_config.json").read_text())["model"]["decoder"]["session_options"][name] == value
    if target != "tensorrt":
        ids = np.random.default_rng(3).integers(5, tiny.VOCAB, (2, 24))
        with opened(out) as ours, opened(source) as reference:
            found, wanted = (session.prefill(ids, [24, 9]) for session in (ours, reference))
        # a tie that rounds the other way moves an activation by a step of 1 / 127
        assert float(np.abs(found - wanted).max() / np.ptp(wanted)) < 0.02


def test_a_static_scale_needs_a_token() -> None:
    scheme = QuantScheme(8, activation_bits=8, dynamic_activations=False)
    solver = SmoothQuant.__new__(SmoothQuant)
    with pytest.raises(InputError, match=r"experts\.3.*dynamic_activations: true"):
        solver.solve({"experts.3": np.zeros((8, 8))}, {"experts.3": scheme}, Statistics(8))  # type: ignore[dict-item]
