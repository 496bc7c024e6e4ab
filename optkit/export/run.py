"""checkpoint -> artifact: a directory with the graph, its weights, the tokenizer and a manifest."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from optkit.checkpoint.model import Checkpoint, open_checkpoint
from optkit.errors import UsageError
from optkit.export import trace
from optkit.export.lower import finish, ort
from optkit.export.lower import onnx as standard
from optkit.export.lower.translate import translate
from optkit.export.verify import verify_onnx
from optkit.export.weights import Weights, hollow_model
from optkit.manifest import Manifest, library_versions, staged_directory, write_manifest
from optkit.recipe import ExportRecipe, parse_section

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MODEL_FILE = "model.onnx"
DEFAULT_MAX_SEQ_LEN = 8192



@dataclasses.dataclass(frozen=True)
class Target:
    """A layout, a translation table and the clean-ups after it."""

    layout: str
    table: type[ort.OrtTable]
    finish: Callable[..., Any]


TARGETS = {
    "ort": Target("slots", ort.OrtTable, finish.finish_ort),
    "onnx": Target("slots", standard.OnnxTable, functools.partial(finish.finish_standard, symmetric_only=False)),
    "tensorrt": Target("scatter", standard.TensorRTTable, functools.partial(finish.finish_standard, symmetric_only=True)),
}

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
        recipe: the ``export`` section; ``options`` override its keys (``target="ort"``, ``dtype="fp32"``, ``max_seq_len=2048``).
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
    if out_dir is None:
        raise UsageError("export: give an output directory (out_dir)")
    report = _steps(progress)
    report("open")
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    with staged_directory(out_dir) as staging:
        facts = write_graph(opened, settings, staging, report)
        opened.copy_support_files(staging)
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
    return Path(out_dir)


def _steps(progress: Progress | None) -> Callable[[str], None]:
    if progress is None:
        return lambda step: None
    return lambda step: progress(f"export: {step}", STEPS.index(step), len(STEPS))


def _settings(recipe: ExportRecipe | Mapping[str, Any] | None, options: Mapping[str, Any]) -> ExportRecipe:
    if isinstance(recipe, ExportRecipe):
        return dataclasses.replace(recipe, **options)
    return parse_section(ExportRecipe, {**(recipe or {}), **options}, "export")  # type: ignore[no-any-return]


def write_graph(checkpoint: Checkpoint, settings: ExportRecipe, staging: Path, report: Callable[[str], None]) -> dict[str, Any]:
    """Traces, lowers and writes the graph into ``staging``; returns the facts for the manifest."""
    dtype = DTYPES[settings.dtype]
    max_seq_len = settings.max_seq_len or min(checkpoint.spec.max_seq_len, DEFAULT_MAX_SEQ_LEN)
    report("reference")
    reference = untouched_reference(checkpoint, dtype)
    report("prepare")
    skeleton, weights = hollow(checkpoint, dtype)
    target = TARGETS[settings.target]
    prepared = trace.prepare(skeleton, weights, reference, target.layout, max_seq_len, target.table.fused_experts)
    report("trace")
    program = trace.capture(prepared)
    report("lower")
    opset = settings.opset or ort.OPSET
    table = target.table(opset, prepared.spec.layout, settings.accuracy_level).table()
    model = translate(program, table, opset, trace.input_names(prepared.spec), trace.output_names(prepared.spec))
    del program
    target.finish(model, prepared.spec, weights)
    report("write")
    finish.save(model, staging / MODEL_FILE)
    report("verify")
    verified = verify_onnx(staging / MODEL_FILE, prepared.spec, reference, dtype)
    graph = prepared.spec.to_dict()
    return {
        "target": settings.target,
        "graph": graph,
        "model_file": MODEL_FILE,
        "quantization": dict(Counter(scheme.describe() for scheme in checkpoint.quantization.values())),
        "verified": verified,
        **prepared.facts,
    }


def hollow(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[torch.nn.Module, Weights]:
    """A fresh skeleton with hollow weights read from the checkpoint."""
    skeleton = checkpoint.skeleton(dtype)
    return skeleton, hollow_model(skeleton, lambda name: checkpoint.tensor_for(name, dtype))


def untouched_reference(checkpoint: Checkpoint, dtype: torch.dtype) -> trace.Reference:
    """The model's own answers, computed with one layer's weights in memory at a time."""
    skeleton, weights = hollow(checkpoint, dtype)
    with weights.streamed(skeleton):
        return trace.reference(skeleton, checkpoint.spec.vocab_size)
