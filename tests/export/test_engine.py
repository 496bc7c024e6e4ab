"""Engines are built in a child process that can be stopped, leave nothing half-written, and have a sidecar that tells."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from optkit import cuda, sidecar
from optkit.errors import (
    ArtifactError,
    DependencyError,
    EngineError,
    LimitError,
    UnsupportedError,
    UsageError,
    VerificationError,
)
from optkit.export import engine as engines
from optkit.export import engine_worker
from optkit.export.engine import EngineOptions, EngineReport, build_engine, check_sidecar
from optkit.export.lint import graph_inputs
from optkit.export.profiles import Profile, Range, solve_profile, solve_profiles
from optkit.manifest import file_digest
from tests import tiny, trt_cases

SLOTS = 128
ONE = EngineOptions(compute_capabilities=("8.6",))


def write_decoder(
    directory: Path, bits: int = 16, dtype: Any = np.float16, external: bool = False, window: int | None = None
) -> Path:
    model = tiny.build("llama")
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    graph = trt_cases.decoder(state, model.config, dtype=dtype, bits=bits, slots=SLOTS, window=window)
    path = directory / "model.onnx"
    onnx.save(graph, path, save_as_external_data=external, location="model.onnx.data", size_threshold=0)
    return path


def profiles_of(path: Path) -> tuple[Profile, ...]:
    return solve_profiles(graph_inputs(path), max_seq_len=SLOTS, max_batch=4, max_prefill=64)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EngineReport, list[tuple[str, int, int]]]:
    """A decoder's engine: the directory, the report, and the progress that was told."""
    pytest.importorskip("tensorrt_rtx")
    directory = tmp_path_factory.mktemp("engine")
    path = write_decoder(directory, external=True)
    steps: list[tuple[str, int, int]] = []
    report = build_engine(path, directory / "engine.plan", profiles_of(path), ONE, lambda *step: steps.append(step))
    return directory, report, steps


# ---------------------------------------------------------------- what is built


def test_the_plan_its_sidecar_and_nothing_else_are_there(built) -> None:
    directory, report, _ = built
    assert {p.name for p in directory.iterdir()} == {"model.onnx", "model.onnx.data", "engine.plan", "engine.plan.json"}
    assert report.plan_bytes == (directory / "engine.plan").stat().st_size > 100_000
    assert report.peak_rss_bytes > 50 << 20
    assert report.build_seconds <= report.total_seconds
    assert report.notes == ()


def test_the_sidecar_says_what_the_plan_is(built) -> None:
    directory, report, _ = built
    read = sidecar.read_sidecar(directory / "engine.plan")
    assert read == dataclasses.replace(report.sidecar, profiles=read.profiles, build=read.build)
    assert read.flavour == "tensorrt_rtx"
    assert read.library_version == sidecar.installed_version("tensorrt_rtx")
    assert read.compute_capabilities == ("8.6",)
    assert [p["name"] for p in read.profiles] == ["prefill", "decode"]
    assert read.profile_range(0, "input_ids") == ((1, 1), (1, 16), (4, 64))
    assert read.profile_range(1, "input_ids") == ((1, 1), (1, 1), (4, 1))
    assert {t.name for t in read.inputs} >= {"input_ids", "position_ids", "write_indices", "logits_positions"}
    assert next(t for t in read.inputs if t.name == "past_key_values.1.value").shape == (-1, 2, SLOTS, 16)
    assert next(t for t in read.outputs if t.name == "logits").dtype == "float16"
    assert read.aliases == {f"present.{i}.{r}": f"past_key_values.{i}.{r}" for i in range(2) for r in ("key", "value")}
    assert read.onnx["external"] == ["model.onnx.data"]
    assert read.plan["sha256"] == file_digest(directory / "engine.plan")
    assert read.timing_cache is None
    assert read.build["seconds"] > 0


def test_progress_is_told_while_it_works(built) -> None:
    _, _, steps = built
    assert len({phase for phase, _, _ in steps}) > 3
    assert all(0 <= step <= max(total, step) for _, step, total in steps)


@pytest.mark.parametrize(("bits", "kind"), [(16, "float16"), (8, "float16"), (4, "float16"), (4, "float32")])
def test_a_whole_decoder_builds_with_two_profiles(tmp_path: Path, bits: int, kind: str) -> None:
    pytest.importorskip("tensorrt_rtx")
    path = write_decoder(tmp_path, bits, getattr(np, kind), window=8)
    report = build_engine(path, tmp_path / "e.plan", profiles_of(path), ONE)
    assert len(report.sidecar.profiles) == 2
    assert len(report.sidecar.aliases) == 4
    rules = {note.rule for note in report.notes}
    assert rules == (set() if kind == "float16" else {"attention-decomposed"})


def test_a_norm_in_float32_inside_a_half_precision_graph_stays_float32(tmp_path: Path) -> None:
    """NVIDIA/TensorRT#2338, #2869, #3657: NaN with dynamic shapes, accuracy lost in fp16 norms."""
    library = pytest.importorskip("tensorrt_rtx")
    f16, f32 = trt_cases.F16, trt_cases.F32
    graph = trt_cases.make(
        [
            trt_cases.node("Cast", ["x"], ["wide"], to=f32),
            trt_cases.node("LayerNormalization", ["wide", "g"], ["normed"], name="norm", axis=-1),
            trt_cases.node("Cast", ["normed"], ["y"], to=f16),
        ],
        [("x", f16, ["b", "s", 64])],
        [("y", f16, ["b", "s", 64])],
        [trt_cases.constant("g", trt_cases.weights(64, dtype=np.float32))],
    )
    path = tmp_path / "norm.onnx"
    onnx.save(graph, path)
    logger = engine_worker.make_logger(library, [])
    network, _parser = engine_worker.parse(library, library.Builder(logger), logger, str(path))
    norms = [layer for layer in engine_worker.layers(network) if layer.type == library.LayerType.NORMALIZATION]
    assert [layer.get_input(0).dtype for layer in norms] == [library.DataType.FLOAT]
    ranges = {"b": Range(1, 2, 4), "s": Range(1, 5, 64)}
    pair = [
        solve_profile("prefill", graph_inputs(path), ranges),
        solve_profile("decode", graph_inputs(path), ranges | {"s": Range(1, 1, 1)}),
    ]
    assert build_engine(path, tmp_path / "norm.plan", pair, ONE).plan_bytes > 0
    feeds = [
        np.full((b, s, 64), 200.0, np.float16) * np.linspace(-1, 1, 64, dtype=np.float16) for b, s in ((1, 1), (2, 5), (4, 64))
    ]
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert all(np.isfinite(session.run(None, {"x": x})[0]).all() for x in feeds)


def test_two_profiles_whose_shapes_contradict_each_other_are_refused_by_the_library_and_never_solved(tmp_path: Path) -> None:
    """NVIDIA/TensorRT#1808, with the shapes of the report's kind: a mask that is not past plus new tokens."""
    pytest.importorskip("tensorrt_rtx")
    inputs = {"x": ("b", "past_sequence_length"), "m": ("b", "total_sequence_length"), "n": ("b", "sequence_length")}
    graph = trt_cases.make(
        [trt_cases.node("Concat", ["x", "n"], ["t"], axis=1), trt_cases.node("Add", ["t", "m"], ["y"])],
        [(name, trt_cases.F16, dims) for name, dims in inputs.items()],
        [("y", trt_cases.F16, ["b", "total_sequence_length"])],
    )
    path = tmp_path / "mask.onnx"
    onnx.save(graph, path)
    ranges = {"b": Range(1, 1, 1), "past_sequence_length": Range(1, 4, 8), "sequence_length": Range(1, 2, 4)}
    solved = solve_profile("p", graph_inputs(path), ranges)
    assert build_engine(path, tmp_path / "ok.plan", [solved], ONE).plan_bytes > 0
    wrong = dataclasses.replace(solved, shapes={**solved.shapes, "m": ((1, 2), (1, 9), (1, 12))})
    with pytest.raises(EngineError):
        build_engine(path, tmp_path / "no.plan", [wrong], ONE)


# ---------------------------------------------------------------- what goes wrong


def leftovers(directory: Path, before: set[str]) -> set[str]:
    return {p.name for p in directory.iterdir()} - before


def test_a_build_that_takes_too_long_is_stopped_and_leaves_nothing(tmp_path: Path) -> None:
    """NVIDIA/TensorRT#2928: a conversion that never ends."""
    pytest.importorskip("tensorrt_rtx")
    path = write_decoder(tmp_path)
    before = {p.name for p in tmp_path.iterdir()}
    started = time.monotonic()
    with pytest.raises(LimitError, match=r"more than 0\.05 s"):
        build_engine(path, tmp_path / "e.plan", profiles_of(path), dataclasses.replace(ONE, timeout_s=0.05))
    assert time.monotonic() - started < 60, "it was not waited for"
    assert leftovers(tmp_path, before) == set()
    assert _children() == []


def _children() -> list[str]:
    """Command lines of this process's children that are the build worker."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(entry.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(entry.with_name("cmdline").read_bytes().decode())
        except (OSError, IndexError):
            continue
    return [line for line in found if engines.WORKER in line]


def test_a_build_that_takes_too_much_memory_is_stopped_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    path = write_decoder(tmp_path)
    before = {p.name for p in tmp_path.iterdir()}
    with pytest.raises(LimitError, match="more than the limit of 64 MiB"):
        build_engine(path, tmp_path / "e.plan", profiles_of(path), dataclasses.replace(ONE, memory_limit_bytes=64 << 20))
    assert leftovers(tmp_path, before) == set()


def test_a_failed_build_keeps_the_engine_that_was_there(built, tmp_path: Path) -> None:
    directory, _, _ = built
    before = {p.name: p.stat().st_mtime_ns for p in directory.iterdir()}
    with pytest.raises(LimitError):
        build_engine(
            directory / "model.onnx",
            directory / "engine.plan",
            profiles_of(directory / "model.onnx"),
            dataclasses.replace(ONE, timeout_s=0.05),
        )
    assert {p.name: p.stat().st_mtime_ns for p in directory.iterdir()} == before


def test_the_lint_speaks_before_the_library_and_names_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx")
    monkeypatch.setattr(engines, "run_worker", lambda *arguments: pytest.fail("the worker was started"))
    path = tmp_path / "m.onnx"
    onnx.save(trt_cases.attention(mask=None, is_causal=1), path)
    with pytest.raises(UnsupportedError, match=r"it \(Attention\).*upper left.*position_ids"):
        build_engine(path, tmp_path / "e.plan", [], ONE)


def test_what_the_lint_does_not_know_the_parser_s_error_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx")
    monkeypatch.setattr(engines, "lint", lambda *arguments: [])
    path = tmp_path / "m.onnx"
    onnx.save(trt_cases.attention(softcap=9.0), path)
    with pytest.raises(UnsupportedError, match=r"refuses the graph: it \(Attention\).*softcap"):
        build_engine(path, tmp_path / "e.plan", [], ONE)
    onnx.save(trt_cases.attention(mask=None, nonpad=True), path)
    with pytest.raises(VerificationError, match="valid"):
        build_engine(path, tmp_path / "e.plan", [], ONE)


def test_a_profile_for_an_input_the_network_lacks_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    path = write_decoder(tmp_path)
    first, *_ = profiles_of(path)
    wrong = dataclasses.replace(first, shapes={**first.shapes, "token_type_ids": ((1, 1), (1, 1), (1, 1))})
    with pytest.raises(EngineError, match="token_type_ids"):
        build_engine(path, tmp_path / "e.plan", [wrong], ONE)


def test_a_worker_that_dies_is_an_error_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "WORKER", "optkit.no_such_module")
    with pytest.raises(EngineError, match="no_such_module"):
        engines.run_worker({}, ONE, tmp_path, None)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    with pytest.raises(ArtifactError, match=r"nothing\.onnx"):
        build_engine(tmp_path / "nothing.onnx", tmp_path / "e.plan", [], ONE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flavour": "openvino"}, "flavour"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"optimization_level": 6}, "optimization_level"),
        ({"compute_capabilities": ("ampere",)}, "compute capability"),
        ({"fail_on_timing_cache_miss": True}, "times nothing"),
        ({"timing_cache": "t.bin"}, "times nothing"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message) -> None:
    with pytest.raises(UsageError, match=message):
        EngineOptions(**options)


# ---------------------------------------------------------------- standard TensorRT, which does not run here


def test_standard_tensorrt_without_a_driver_is_refused_before_anything_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Creating its Builder without a driver ended the process."""
    monkeypatch.setattr(cuda, "_ask", lambda: "no NVIDIA driver is installed (libcuda is not found)")
    with pytest.raises(UnsupportedError, match=r"no NVIDIA driver.*--build-only"):
        build_engine(tmp_path / "m.onnx", tmp_path / "e.plan", [], EngineOptions(flavour="tensorrt"))
    assert "tensorrt" not in sys.modules


def test_a_library_that_is_not_installed_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise sidecar.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(sidecar.importlib.metadata, "version", missing)
    with pytest.raises(DependencyError, match=r"optkit\[trt-rtx\]"):
        engines.check_machine("tensorrt_rtx")


def test_the_timing_cache_of_standard_tensorrt_is_loaded_saved_and_refused_when_foreign(tmp_path: Path) -> None:
    """NVIDIA/TensorRT#4730, #3316, #4798, #568: a pinned cache is what makes two builds choose the same kernels."""

    class Config:
        accepts, cache = True, None

        def create_timing_cache(self, data: bytes) -> Any:
            return SimpleNamespace(data=data, serialize=lambda: data + b"+")

        def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
            assert ignore_mismatch is False
            self.cache = cache
            return self.accepts

        def get_timing_cache(self) -> Any:
            return self.cache

    stored, saved = tmp_path / "in", tmp_path / "out"
    stored.write_bytes(b"timed")
    config = Config()
    engine_worker.use_timing_cache(config, str(stored))
    engine_worker.save_timing_cache(config, str(saved))
    assert saved.read_bytes() == b"timed+"
    engine_worker.use_timing_cache(config, None)
    config.accepts = False
    with pytest.raises(engine_worker.BuildFailed, match="not accepted"):
        engine_worker.use_timing_cache(config, str(stored))


# ---------------------------------------------------------------- the sidecar's word


def copy_of(built: Any, tmp_path: Path, **changes: Any) -> Path:
    directory, _, _ = built
    for name in ("engine.plan", "engine.plan.json", "model.onnx", "model.onnx.data"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    described = tmp_path / "engine.plan.json"
    described.write_text(json.dumps({**json.loads(described.read_text()), **changes}))
    return tmp_path / "engine.plan"


def test_a_plan_with_its_own_sidecar_is_accepted(built, tmp_path: Path) -> None:
    plan = copy_of(built, tmp_path)
    assert check_sidecar(plan, capability="8.6", onnx=tmp_path / "model.onnx").flavour == "tensorrt_rtx"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"library_version": "1.6.0"}, r"built by tensorrt_rtx 1\.6\.0, and .* is installed"),
        ({"compute_capabilities": ["12.0"]}, r"compiled for compute capability 12\.0, and this GPU is 8\.6"),
        ({"plan": {"file": "engine.plan", "sha256": "0" * 64, "bytes": 1}}, "truncated or replaced"),
        ({"format_version": 99}, "newer than this optkit"),
        ({"surprise": 1}, "damaged"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_the_reason(built, tmp_path: Path, changes, message) -> None:
    with pytest.raises(ArtifactError, match=message):
        check_sidecar(copy_of(built, tmp_path, **changes), capability="8.6")


def test_a_changed_plan_graph_or_weight_file_is_noticed(built, tmp_path: Path) -> None:
    plan = copy_of(built, tmp_path)
    weights = tmp_path / "model.onnx.data"
    flipped = bytearray(weights.read_bytes())
    flipped[100] ^= 1
    weights.write_bytes(flipped)
    with pytest.raises(ArtifactError, match="not built from"):
        check_sidecar(plan, onnx=tmp_path / "model.onnx")
    content = bytearray(plan.read_bytes())
    content[len(content) // 2] ^= 1
    plan.write_bytes(content)
    with pytest.raises(ArtifactError, match="not what its sidecar recorded"):
        check_sidecar(plan)
    check_sidecar(plan, digest=False)


def test_a_plan_without_a_sidecar_is_refused(built, tmp_path: Path) -> None:
    plan = copy_of(built, tmp_path)
    (tmp_path / "engine.plan.json").unlink()
    with pytest.raises(ArtifactError, match=r"engine\.plan\.json beside it"):
        check_sidecar(plan)


def test_a_timing_cache_is_checked_against_its_digest(built, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"cache")
    _, report, _ = built
    known = dataclasses.replace(report.sidecar, timing_cache={"file": "t", "sha256": file_digest(path), "bytes": 5})
    sidecar.check_timing_cache(path, known)
    path.write_bytes(b"other")
    with pytest.raises(ArtifactError, match="not what its sidecar recorded"):
        sidecar.check_timing_cache(path, known)
    with pytest.raises(ArtifactError, match="records no timing cache"):
        sidecar.check_timing_cache(path, report.sidecar)


def test_two_builds_of_one_graph_are_told_apart_by_their_own_digests(built, tmp_path: Path) -> None:
    """NVIDIA/TensorRT#4730 and others: same command, different engine: a plan's identity is its own digest."""
    directory, report, _ = built
    again = build_engine(directory / "model.onnx", tmp_path / "engine.plan", profiles_of(directory / "model.onnx"), ONE)
    assert again.sidecar.onnx["sha256"] == report.sidecar.onnx["sha256"]
    for plan, side in ((directory / "engine.plan", report.sidecar), (tmp_path / "engine.plan", again.sidecar)):
        assert file_digest(plan) == side.plan["sha256"]
    if again.sidecar.plan["sha256"] != report.sidecar.plan["sha256"]:
        (tmp_path / "engine.plan").write_bytes((directory / "engine.plan").read_bytes())
        with pytest.raises(ArtifactError):
            check_sidecar(tmp_path / "engine.plan")


# ---------------------------------------------------------------- driver, public API, other tools


def test_the_driver_is_asked_without_a_library_and_its_silence_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_load", lambda: None)
    assert cuda.find_driver() is None
    assert "libcuda is not found" in cuda.why_no_driver()

    class Silent:
        def cuInit(self, flags: int) -> int:
            return 100

    monkeypatch.setattr(cuda, "_load", Silent)
    assert cuda.find_driver() is None
    assert "cuInit returned 100" in cuda.why_no_driver()


def test_a_driver_with_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def cuInit(self, flags: int) -> int:
            return 0

        def cuDriverGetVersion(self, version: Any) -> int:
            version._obj.value = 13000
            return 0

        def cuDeviceGetCount(self, count: Any) -> int:
            count._obj.value = 1
            return 0

        def cuDeviceGet(self, handle: Any, index: int) -> int:
            return 0

        def cuDeviceGetName(self, name: Any, size: int, handle: Any) -> int:
            name.value = b"Some GPU"
            return 0

        def cuDeviceGetAttribute(self, value: Any, which: int, handle: Any) -> int:
            value._obj.value = {75: 8, 76: 9}[which]
            return 0

        def cuDeviceTotalMem_v2(self, size: Any, handle: Any) -> int:
            size._obj.value = 24 << 30
            return 0

    monkeypatch.setattr(cuda, "_load", Driver)
    assert cuda.find_driver() == cuda.Driver("13.0", (cuda.Device("Some GPU", "8.9", 24 << 30),))
    assert cuda.why_no_driver() == ""


def test_the_builder_stands_on_the_public_api_alone() -> None:
    """NVIDIA/Model-Optimizer#1210 and TensorRT-LLM's removed builder: tools that vanish under their users."""
    text = "".join(Path(module.__file__).read_text() for module in (engines, engine_worker))
    for gone in ("tensorrt_llm", "modelopt", "onnx_graphsurgeon", "trtexec", "polygraphy"):
        assert gone not in text


def test_polygraphy_reads_the_graph_that_is_written(built) -> None:
    polygraphy = pytest.importorskip("polygraphy.backend.onnx")
    directory, report, _ = built
    loaded = polygraphy.OnnxFromPath(str(directory / "model.onnx"))()
    from polygraphy.backend.onnx import util

    inputs = util.get_input_metadata(loaded.graph)
    assert set(inputs) == {t.name for t in report.sidecar.inputs}
    assert {t.name for t in report.sidecar.outputs} == set(util.get_output_metadata(loaded.graph))


def test_polygraphy_inspects_the_graph_that_is_written(built) -> None:
    pytest.importorskip("polygraphy")
    import subprocess

    directory, report, _ = built
    command = [
        sys.executable,
        "-c",
        "from polygraphy.tools import main; main()",
        "inspect",
        "model",
        str(directory / "model.onnx"),
        "--show",
        "layers",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    for tensor in (*report.sidecar.inputs, *report.sidecar.outputs):
        assert tensor.name in result.stdout
    assert "TensorScatter" in result.stdout
