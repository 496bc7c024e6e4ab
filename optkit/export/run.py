"""checkpoint -> artifact: a directory with the graph, its weights, the tokenizer and a manifest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from optkit.checkpoint.model import Checkpoint, open_checkpoint
from optkit.errors import UsageError
from optkit.export.artifact_engine import BuildPlan, build_artifact, write_build_file
from optkit.export.engine import EngineOptions
from optkit.export.gguf import write_gguf
from optkit.export.graph import write_graph
from optkit.export.interop import write_genai_config
from optkit.export.profiles import parse_capabilities
from optkit.io_spec import GraphSpec
from optkit.manifest import Manifest, library_versions, staged_directory, write_manifest
from optkit.recipe import ExportRecipe, parse_section

Progress = Callable[..., None]
STEPS = ("open", "reference", "prepare", "trace", "lower", "write", "verify", "digests")


def export(
    checkpoint: str | Path | Checkpoint,
    recipe: ExportRecipe | Mapping[str, Any] | None = None,
    out_dir: str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Path:
    """Exports a checkpoint (a directory, a hub id or a GGUF file).

    Args:
        checkpoint: floating point, or quantized by ``optkit.quantize`` (or in another compressed-tensors directory).
        recipe: the ``export`` section; ``options`` override its keys (``target="ort"``, ``dtype="fp32"``,
            ``max_seq_len=2048``).
        out_dir: replaced if it is an optkit directory; never half-written.
        progress: called with ``(step, done, total)``, see STEPS.

    Returns:
        ``out_dir``.

    Raises:
        CheckpointError, UsageError, UnsupportedError: before anything is written.
        VerificationError: what was written does not answer like the model; nothing stays behind.
        StorageError: disk full.
    """
    settings = _settings(recipe, options)
    if settings.build and settings.target != "tensorrt":
        raise UsageError(f"build: an engine is built for target tensorrt, not {settings.target}")
    if out_dir is None:
        raise UsageError("export: give an output directory (out_dir)")
    report = _steps(progress)
    report("open")
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    with staged_directory(out_dir) as staging:
        if settings.target == "gguf":
            facts = write_gguf(opened, settings, staging, report)
        else:
            facts = write_graph(opened, settings, staging, report)
        opened.copy_support_files(staging)
        if settings.target == "ort":
            spec = GraphSpec.from_dict(facts["graph"])
            facts["genai_config"] = write_genai_config(staging, spec, opened.spec, facts["model_file"])
        if settings.target == "tensorrt":
            write_build_file(staging, engine_plan(settings))
        manifest = Manifest(
            kind="artifact",
            source={"digest": opened.digest, "given": opened.given},
            recipe=dataclasses.asdict(settings),
            versions=library_versions("optkit", "torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime"),
            model=opened.spec,
            facts=facts,
        )
        report("digests")
        write_manifest(staging, manifest)
    if settings.build:
        build_artifact(out_dir, progress=progress)
    return Path(out_dir)


def engine_plan(settings: ExportRecipe) -> BuildPlan:
    """What the ``export`` section says of the engine."""
    options = EngineOptions(flavour=settings.flavour)
    if settings.compute_capabilities:
        capabilities = parse_capabilities(",".join(settings.compute_capabilities))
        options = dataclasses.replace(options, compute_capabilities=capabilities)
    return BuildPlan(settings.max_batch, settings.max_prefill, options)


def _steps(progress: Progress | None) -> Callable[[str], None]:
    if progress is None:
        return lambda step: None
    return lambda step: progress(f"export: {step}", STEPS.index(step), len(STEPS))


def _settings(recipe: ExportRecipe | Mapping[str, Any] | None, options: Mapping[str, Any]) -> ExportRecipe:
    if isinstance(recipe, ExportRecipe):
        return dataclasses.replace(recipe, **options)
    return parse_section(ExportRecipe, {**(recipe or {}), **options}, "export")  # type: ignore[no-any-return]
