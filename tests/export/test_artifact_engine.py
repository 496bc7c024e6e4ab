"""An exported artifact becomes one with an engine: build.json, profiles from its graph, the manifest, and a session over it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optkit import manifest
from optkit.errors import ArtifactError, LimitError, UsageError
from optkit.export.artifact_engine import (
    BUILD_FILE,
    PLAN_FILE,
    BuildPlan,
    artifact_profiles,
    build_artifact,
    read_build_file,
    write_build_file,
)
from optkit.export.engine import EngineOptions, check_sidecar
from optkit.export.lint import errors, lint
from optkit.export.run import export
from optkit.quantize.run import quantize
from optkit.runtime.backends import trt
from optkit.runtime.backends._trt_device import HostDevice
from tests import tiny
from tests.runtime import standin

ONE = EngineOptions(compute_capabilities=("8.6",))
# float16 graph against float32 model over the logit range, ragged prompt and decode; 2e-3 measured for these models
FLOAT16_OF_RANGE = 1e-2
#: model families whose float16, INT8 and INT4 engines are built
FAMILIES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen3",
    "granite",
    "glm",
    "gemma2",
    "gemma3_text",
    "cohere",
    "phi3",
    "gpt2",
    "opt",
)

#: and those with 8-bit activations as well: attention with rotary embeddings and without, experts
INT8_ACTIVATIONS = ("llama", "gpt2", "mixtral")
STATIC_W8A8: dict[str, Any] = {
    "scheme": "w8a8",
    "method": "smoothquant",
    "dynamic_activations": False,
    "calibration": {"source": "self", "samples": 4, "length": 48},
}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("artifact")
    return export(tiny.save("mistral", directory / "hf"), out_dir=directory / "out", target="tensorrt", dtype="fp16")


@pytest.fixture
def copy(artifact: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(artifact, tmp_path / "copy"))


def over_stand_in(directory: Path) -> trt.TrtSession:
    graph, spec = trt._described(directory)
    model = directory / str(manifest.read_manifest(directory).facts["model_file"])
    engine = standin.Engine(model, [p.shapes for p in artifact_profiles(directory, read_build_file(directory))])
    return trt.make_session(engine, HostDevice(), graph, spec, directory)


def test_the_exporter_s_graph_has_nothing_the_lint_finds(artifact: Path) -> None:
    assert lint(artifact / "model.onnx", capabilities=("8.6",)) == []


def test_the_backend_runs_the_exporter_s_graph_and_answers_like_transformers(artifact: Path) -> None:
    model = tiny.build("mistral")
    ids = np.random.default_rng(0).integers(5, tiny.VOCAB, (3, 19))
    lengths = [19, 4, 11]

    def truth(row: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return model(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0, -1].numpy()

    with over_stand_in(artifact) as session:
        logits = session.prefill(ids, lengths)
        after = session.decode([7, 8, 9])
        every = session.prefill(ids, lengths, logits="all")
    for row, length in enumerate(lengths):
        for ours, want in (
            (logits[row], truth(ids[row, :length])),
            (after[row], truth(np.append(ids[row, :length], 7 + row))),
            (every[row, length // 2], truth(ids[row, : length // 2 + 1])),
        ):
            assert np.abs(ours - want).max() / np.ptp(want) < FLOAT16_OF_RANGE


def test_generate_on_text_costs_one_prefill_and_a_decode_for_every_further_token(artifact: Path) -> None:
    """And stops at a wish for more than S_max before anything runs."""
    with over_stand_in(artifact) as session:
        engine = session.bindings.engine
        result = session.generate(["one two three", "four"], max_new_tokens=6, min_new_tokens=6)
        assert [len(tokens) for tokens in result.tokens] == [6, 6]
        assert engine.runs == 6
        with pytest.raises(LimitError, match="max_seq_len"):
            session.generate("one", max_new_tokens=tiny.POSITIONS)
        assert engine.runs == 6


def test_the_engine_is_built_from_build_json_and_recorded(copy: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    write_build_file(copy, BuildPlan(max_batch=2, max_prefill=32, options=ONE))
    report = build_artifact(copy)
    assert report.sidecar.profile_range(0, "input_ids")[2] == (2, 32)
    read = manifest.read_manifest(copy)
    assert {PLAN_FILE, f"{PLAN_FILE}.json", BUILD_FILE} <= set(read.files)
    assert read.facts["engine"]["compute_capabilities"] == ["8.6"]
    assert read.facts["verified"]["logit_error"], "the graph was compared with the model before"
    manifest.check_files(copy, read, digests=True)
    check_sidecar(copy / PLAN_FILE, capability="8.6", onnx=copy / "model.onnx")
    assert build_artifact(copy).sidecar.onnx == report.sidecar.onnx, "and it can be built again"


def test_a_build_that_fails_leaves_the_artifact_as_it_was(copy: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    before = {p.name: p.read_bytes() for p in copy.iterdir() if p.is_file()}
    with pytest.raises(LimitError):
        build_artifact(copy, BuildPlan(options=dataclasses.replace(ONE, timeout_s=0.05)))
    assert {p.name: p.read_bytes() for p in copy.iterdir() if p.is_file()} == before


def test_a_changed_graph_is_not_built(copy: Path) -> None:
    (copy / "model.onnx.data").write_bytes(b"0" * (copy / "model.onnx.data").stat().st_size)
    with pytest.raises(ArtifactError, match=r"model\.onnx\.data"):
        build_artifact(copy)


def test_another_target_is_refused(copy: Path) -> None:
    path = copy / manifest.FILE_NAME
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "facts": {**data["facts"], "target": "ort"}}))
    with pytest.raises(UsageError, match="target ort"):
        build_artifact(copy)


def test_build_json_goes_there_and_back_and_a_wrong_key_is_named(tmp_path: Path) -> None:
    plan = BuildPlan(8, 128, dataclasses.replace(ONE, optimization_level=2, workspace_bytes=1 << 30))
    write_build_file(tmp_path, plan)
    assert read_build_file(tmp_path) == plan
    (tmp_path / BUILD_FILE).write_text('{"max_bacth": 3}')
    with pytest.raises(ArtifactError, match=r"max_bacth.*did you mean 'max_batch'"):
        read_build_file(tmp_path)
    (tmp_path / BUILD_FILE).write_text("{")
    with pytest.raises(ArtifactError, match="damaged"):
        read_build_file(tmp_path)
    (tmp_path / BUILD_FILE).unlink()
    assert read_build_file(tmp_path) == BuildPlan()


def test_a_model_whose_rotary_table_switches_is_prefilled_in_one_go(copy: Path) -> None:
    path = copy / manifest.FILE_NAME
    data = json.loads(path.read_text())
    data["facts"]["graph"]["rope_switch"] = 64
    path.write_text(json.dumps(data))
    prefill, _ = artifact_profiles(copy, BuildPlan(max_prefill=16))
    assert prefill.shapes["input_ids"][2][1] == tiny.POSITIONS


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_of_all_widths_are_built_for_many_families(
    family: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The export compares every graph with the model in ONNX Runtime before this; here it has to build, clean of findings."""
    pytest.importorskip("tensorrt_rtx")
    checkpoint = tiny.save(family, tmp_path / "hf")
    made: dict[str, Callable[[], Path]] = {
        "fp16": lambda: checkpoint,
        "int8": lambda: quantize(checkpoint, out_dir=tmp_path / "int8", scheme="int8", method="rtn"),
        "int4": lambda: quantize(checkpoint, out_dir=tmp_path / "int4", scheme="int4", method="rtn", group_size=32),
    }
    if family in INT8_ACTIVATIONS:
        made["w8a8"] = lambda: quantize(checkpoint, out_dir=tmp_path / "w8a8", **STATIC_W8A8)
    for scheme, source in made.items():
        out = export(source(), out_dir=tmp_path / f"{scheme}-out", target="tensorrt", dtype="fp16")
        assert errors(lint(out / "model.onnx", capabilities=("8.6",))) == []
        assert build_artifact(out, BuildPlan(options=ONE)).plan_bytes > 0
