"""The engine of an exported artifact: ``build.json`` says how it is to be built, :func:`build_artifact` builds it.

An artifact for target ``tensorrt`` is complete as ONNX plus ``build.json``: it can be made on a machine without any engine
library and finished where the GPU is (``optkit export --build-only DIR``). The graph in it has been compared with the model
in ONNX Runtime before (``facts["verified"]``); that a graph parses and builds proves nothing about its numbers.

``build.json``: ``{"max_batch", "max_prefill", "options": {EngineOptions}}``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optkit import manifest
from optkit.errors import ArtifactError, UnsupportedError, UsageError, nearest
from optkit.export.engine import EngineOptions, EngineReport, Progress, build_engine
from optkit.export.lint import graph_inputs
from optkit.export.profiles import Profile, solve_profiles
from optkit.io_spec import GraphSpec

BUILD_FILE = "build.json"
PLAN_FILE = "engine.plan"
MAX_BATCH = 4
MAX_PREFILL = 512
MIN_ROWS = 2  # of a profile's largest batch: a constant batch of 1 makes TensorRT-RTX store float16 weights twice


@dataclasses.dataclass(frozen=True)
class BuildPlan:
    """What to build from an artifact.

    Attributes:
        max_batch: rows the engine takes, from 1 on; an engine for one row takes two (:data:`MIN_ROWS`).
        max_prefill: new tokens in one run; a longer prompt is read in pieces. At most the artifact's max_seq_len.
        options: of the builder.
    """

    max_batch: int = MAX_BATCH
    max_prefill: int = MAX_PREFILL
    options: EngineOptions = dataclasses.field(default_factory=EngineOptions)


def write_build_file(directory: str | Path, plan: BuildPlan) -> None:
    """Writes ``build.json`` into an artifact that is being made (before its manifest)."""
    text = json.dumps(dataclasses.asdict(plan), indent=1) + "\n"
    (Path(directory) / BUILD_FILE).write_text(text, encoding="utf-8")


def read_build_file(directory: str | Path) -> BuildPlan:
    """The build plan of an artifact; the defaults when it has none.

    Raises:
        ArtifactError: damaged, or with a key this optkit does not know.
    """
    path = Path(directory) / BUILD_FILE
    if not path.is_file():
        return BuildPlan()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        options = dict(data.pop("options", {}))
        _known(path, data, BuildPlan)
        _known(path, options, EngineOptions)
        if "compute_capabilities" in options:
            options["compute_capabilities"] = tuple(options["compute_capabilities"])
        return BuildPlan(**data, options=EngineOptions(**options))
    except (ValueError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path}: damaged ({type(error).__name__}: {error}); export again") from error


def _known(path: Path, data: Mapping[str, Any], cls: type) -> None:
    names = [f.name for f in dataclasses.fields(cls)]
    for key in data:
        if key not in names:
            raise ArtifactError(f"{path}: unknown key {key!r}{nearest(key, names)}; known: {', '.join(names)}")


def artifact_profiles(directory: str | Path, plan: BuildPlan) -> tuple[Profile, Profile]:
    """The prefill and decode profiles of an artifact's graph."""
    path, graph = _graph_of(Path(directory), manifest.read_manifest(directory, "artifact"))
    fresh = min(plan.max_prefill, graph.max_seq_len)
    if graph.rope_switch is not None and graph.rope_switch < graph.max_seq_len:
        fresh = graph.max_seq_len  # a row that crosses the switch is read again in one go
    rows = max(plan.max_batch, MIN_ROWS)
    return solve_profiles(graph_inputs(path), max_seq_len=graph.max_seq_len, max_batch=rows, max_prefill=fresh)


def build_artifact(directory: str | Path, plan: BuildPlan | None = None, progress: Progress | None = None) -> EngineReport:
    """Builds ``engine.plan`` in an artifact for target ``tensorrt`` and records it in the manifest.

    Args:
        directory: the artifact.
        plan: ``None`` takes its ``build.json``.
        progress: as for :func:`optkit.export.engine.build_engine`.

    Raises:
        ArtifactError: not such an artifact, or its files are not what the manifest says. UsageError: another target.
        Others: as :func:`optkit.export.engine.build_engine`; the artifact is then as it was.
    """
    directory = Path(directory)
    read = manifest.read_manifest(directory, "artifact")
    target = read.facts.get("target")
    if target != "tensorrt":
        raise UsageError(f"{directory}: exported for target {target}; an engine is built from target tensorrt")
    path, _ = _graph_of(directory, read)
    manifest.check_files(directory, dataclasses.replace(read, files=_without_engine(read.files)), digests=True)
    plan = read_build_file(directory) if plan is None else plan
    report = build_engine(path, directory / PLAN_FILE, artifact_profiles(directory, plan), plan.options, progress)
    write_build_file(directory, plan)
    engine = {
        "file": PLAN_FILE,
        "flavour": report.sidecar.flavour,
        "library_version": report.sidecar.library_version,
        "compute_capabilities": list(report.sidecar.compute_capabilities),
        "notes": [str(note) for note in report.notes],
    }
    manifest.write_manifest(directory, dataclasses.replace(read, facts={**read.facts, "engine": engine}))
    return report


def _graph_of(directory: Path, read: manifest.Manifest) -> tuple[Path, GraphSpec]:
    try:
        graph = GraphSpec.from_dict(read.facts["graph"])
        path = directory / str(read.facts["model_file"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{directory}: {manifest.FILE_NAME} does not describe a graph ({error}); export it again"
        ) from error
    if graph.layout not in ("scatter", "growing"):
        raise UnsupportedError(
            f"{directory}: cache layout {graph.layout} is not one TensorRT takes; export with target tensorrt"
        )
    return path, graph


def _without_engine(files: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The files an engine is made from; plan and build file may be replaced."""
    return {name: entry for name, entry in files.items() if not name.startswith(PLAN_FILE) and name != BUILD_FILE}
