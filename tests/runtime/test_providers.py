"""Execution providers of ONNX Runtime: which a device means, their options, and no silent fall back to the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import onnx
import onnxruntime
import pytest

import optkit
from optkit.errors import EngineError, UnsupportedError, UsageError
from optkit.runtime.backends import _providers, ort
from optkit.runtime.backends._providers import CPU, CUDA, TENSORRT, TENSORRT_RTX, providers_for, with_options
from tests import tiny

ALL = [TENSORRT, TENSORRT_RTX, CUDA, CPU]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("providers")
    model = tiny.save("llama", folder / "model")
    return {target: optkit.export(model, {"target": target}, folder / target) for target in ("ort", "onnx")}


@pytest.fixture
def everything(monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: list(ALL))


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", (CPU,)),
        ("cuda", (CUDA, CPU)),
        ("tensorrt", (TENSORRT, CUDA, CPU)),
        ("tensorrt-rtx", (TENSORRT_RTX, CUDA, CPU)),
        (None, (CUDA, CPU)),
    ],
)
def test_a_device_is_a_provider_and_those_that_take_over_what_it_does_not_run(everything, device, expected):
    assert providers_for(device, "onnx") == expected


def test_without_cuda_no_device_is_the_cpu(monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    assert providers_for(None, "ort") == (CPU,)


@pytest.mark.parametrize("device", ["tensorrt", "tensorrt-rtx"])
def test_tensorrt_providers_are_for_graphs_of_standard_operators(everything, device, artifacts):
    with pytest.raises(UnsupportedError, match="export it with --target onnx"):
        optkit.open_session(artifacts["ort"], device=device)
    assert providers_for(device, "of another exporter")[0] in (TENSORRT, TENSORRT_RTX)


def test_an_unknown_device_and_one_that_is_not_installed_are_named(artifacts, monkeypatch):
    with pytest.raises(UsageError, match=r"'tensort'.*did you mean"):
        optkit.open_session(artifacts["onnx"], device="tensort")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    with pytest.raises(UnsupportedError, match=f"no {TENSORRT}.*optkit\\[gpu\\]"):
        optkit.open_session(artifacts["onnx"], device="tensorrt")


def test_options_go_to_the_wanted_provider_as_text(everything):
    made = with_options(providers_for("tensorrt", "onnx"), {"trt_fp16_enable": True, "trt_max_workspace_size": 1 << 30})
    assert made == [(TENSORRT, {"trt_fp16_enable": "1", "trt_max_workspace_size": "1073741824"}), CUDA, CPU]
    assert with_options((CPU,), None) == [CPU]
    with pytest.raises(UsageError, match="trt_fp16_enable"):
        with_options((CPU,), {"trt_fp16_enable": True})


def test_the_session_gets_the_providers_with_their_options(everything, artifacts, monkeypatch):
    seen = []

    def session(path, settings, providers):
        seen.append(providers)
        return SimpleNamespace(get_providers=lambda: [CPU])

    monkeypatch.setattr(ort.onnxruntime, "InferenceSession", session)
    with pytest.raises(EngineError, match=rf"could not load {TENSORRT_RTX} and fell back to {CPU}"):
        optkit.open_session(artifacts["onnx"], device="tensorrt-rtx", provider_options={"enable_cuda_graph": True})
    assert seen == [[(TENSORRT_RTX, {"enable_cuda_graph": "1"}), CUDA, CPU]]


def test_without_a_device_a_machine_whose_cuda_does_not_load_runs_on_the_cpu(artifacts, monkeypatch):
    """onnxruntime-gpu lists the CUDA provider on machines without a GPU."""
    real = onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(ort.onnxruntime, "InferenceSession", lambda path, settings, providers: real(path, settings, [CPU]))
    with optkit.open_session(artifacts["onnx"]) as session:
        assert session.device == "cpu"


def test_what_loads_is_found_by_opening_a_graph(monkeypatch):
    onnx.checker.check_model(onnx.ModelProto.FromString(_providers.ONE_NODE))
    assert _providers.loads(CPU)
    assert not _providers.loads(CUDA)
    assert not _providers.loads("NoSuchProvider")
