"""One graph from a checkpoint: reference, prepare, trace, lower, write, verify, audit; and what each target may be asked
for."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from optkit.checkpoint.model import Checkpoint
from optkit.errors import UnsupportedError, UsageError, VerificationError
from optkit.export import ranges, rounding, trace
from optkit.export.audit import audit
from optkit.export.lint import lint, raise_errors
from optkit.export.lower import accuracy, finish, ort
from optkit.export.lower import onnx as standard
from optkit.export.lower.translate import translate
from optkit.export.verify import prompt_feeds, smoke_prompt, verify_onnx
from optkit.export.weights import Weights, hollow_model
from optkit.recipe import ExportRecipe

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MODEL_FILE = "model.onnx"
CHUNKS_FILE = "model_chunks.onnx"
DEFAULT_MAX_SEQ_LEN = 8192
SMOKE_PROMPT, SMOKE_STEPS = 12, 16

Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Target:
    """What a target is made with.

    Attributes:
        layout: the graph contract (io_spec.py).
        table: translations of the fused ops.
        finish: clean-ups after translation.
        opsets: ONNX opsets it can be written in; the last is the default.
        dtypes: of activations and caches.
    """

    layout: str
    table: type[ort.OrtTable]
    finish: Callable[..., Any]
    opsets: tuple[int, ...]
    dtypes: tuple[str, ...]


TARGETS = {
    "ort": Target("slots", ort.OrtTable, finish.finish_ort, (21, 22, 23, 24), ("fp32", "fp16")),
    "onnx": Target(
        "slots", standard.OnnxTable, functools.partial(finish.finish_standard, symmetric_only=False), (24,), ("fp32", "fp16")
    ),
    "tensorrt": Target(
        "scatter",
        standard.TensorRTTable,
        functools.partial(finish.finish_standard, symmetric_only=True),
        (24,),
        ("fp32", "fp16", "bf16"),
    ),
}


def check_settings(settings: ExportRecipe, checkpoint: Checkpoint) -> Target:
    """Refuses before any work what the target cannot do.

    Raises:
        UsageError, UnsupportedError.
    """
    target = TARGETS[settings.target]
    if settings.opset is not None and settings.opset not in target.opsets:
        raise UnsupportedError(
            f"opset {settings.opset}: target {settings.target} is written in opset {', '.join(map(str, target.opsets))}"
        )
    if settings.dtype not in target.dtypes:
        raise UnsupportedError(
            f"dtype {settings.dtype}: target {settings.target} takes {' or '.join(target.dtypes)} (ONNX Runtime's CPU "
            "kernels do not compute in bf16, so such an export could not be verified)"
        )
    if settings.chunks and settings.target != "ort":
        raise UnsupportedError(f"chunks: only target ort has per-row query lengths, not {settings.target}")
    dynamic = [n for n, s in checkpoint.quantization.items() if s.activation_bits == 8 and s.dynamic_activations]
    if dynamic and settings.target == "tensorrt":
        raise UnsupportedError(
            f"{len(dynamic)} linears have 8-bit activations with a scale per token (first {dynamic[0]}), and TensorRT takes "
            "calibrated ones only: quantize with method: smoothquant and dynamic_activations: false"
        )
    if settings.cache_layout != "scatter" and settings.target != "tensorrt":
        raise UsageError(f"cache_layout {settings.cache_layout}: a choice of target tensorrt, not of {settings.target}")
    longest = checkpoint.spec.max_seq_len
    if settings.max_seq_len is not None and settings.max_seq_len > longest:
        raise UsageError(f"max_seq_len {settings.max_seq_len}: the model has {longest} positions; ask for at most that")
    return target


def layout_of(settings: ExportRecipe) -> str:
    """The graph contract that is tried first."""
    return settings.cache_layout if settings.target == "tensorrt" else TARGETS[settings.target].layout


@dataclasses.dataclass
class Built:
    """A lowered graph, not yet written."""

    model: ir.Model
    prepared: trace.Prepared

    @property
    def spec(self) -> Any:
        return self.prepared.spec


def write_graph(checkpoint: Checkpoint, settings: ExportRecipe, staging: Path, report: Report) -> dict[str, Any]:
    """Writes the graph (and its ``chunks`` variant) into ``staging``; returns the facts for the manifest."""
    check_settings(settings, checkpoint)
    facts: dict[str, Any] = {"target": settings.target, "model_file": MODEL_FILE}
    if settings.dtype == "fp16":
        facts["activation_range"] = ranges.check_float16(checkpoint, *hollow(checkpoint, torch.bfloat16))
    report("reference")
    computed = "fp32" if settings.dtype == "bf16" else settings.dtype
    reference = untouched_reference(checkpoint, DTYPES[computed])
    layout = layout_of(settings)
    if computed != settings.dtype:  # no CPU kernel: the same graph in float32 is what gets verified
        facts["verified"] = verify_twin(checkpoint, dataclasses.replace(settings, dtype=computed), staging, reference)
    try:
        built, verified = written(checkpoint, settings, layout, reference, staging / MODEL_FILE, report)
    except VerificationError as error:
        if layout != "slots":
            raise
        layout = "growing"
        facts["layout_reason"] = f"growing cache, because with buffers: {error}"
        built, verified = written(checkpoint, settings, layout, reference, staging / MODEL_FILE, report)
    facts |= {"graph": built.spec.to_dict(), **built.prepared.facts}
    facts.setdefault("verified", verified)
    facts["audit"] = audit(built.model, checkpoint, built.prepared)
    if settings.dtype != "bf16":
        prompt = ranges.probe_ids(checkpoint)[:SMOKE_PROMPT]
        facts["smoke"] = smoke_prompt(staging / MODEL_FILE, built.spec, prompt, SMOKE_STEPS)
    facts["quantization"] = dict(Counter(scheme.describe() for scheme in checkpoint.quantization.values()))
    if settings.chunks:
        facts |= write_chunks(checkpoint, settings, reference, staging)
    return facts


def written(
    checkpoint: Checkpoint, settings: ExportRecipe, layout: str, reference: trace.Reference, path: Path, report: Report
) -> tuple[Built, dict[str, Any] | None]:
    """Builds, writes and verifies one graph; ``None`` where no kernel of this machine computes in its type."""
    built = build_graph(checkpoint, settings, layout, reference, report)
    report("write")
    finish.save(built.model, path)
    report("verify")
    if settings.target == "tensorrt":
        raise_errors(lint(path, settings.flavour, settings.compute_capabilities), str(path.name))
    if settings.dtype == "bf16":
        return built, None
    verified = verify_onnx(path, built.spec, reference, DTYPES[settings.dtype])
    rounded = rounding.check(path, prompt_feeds(built.spec, reference), input_scales(checkpoint))
    return built, {**verified, **({"int8_activations": rounded} if rounded else {})}


def build_graph(
    checkpoint: Checkpoint, settings: ExportRecipe, layout: str, reference: trace.Reference, report: Report
) -> Built:
    """Prepares, traces and lowers."""
    target, dtype = TARGETS[settings.target], DTYPES[settings.dtype]
    max_seq_len = settings.max_seq_len or min(checkpoint.spec.max_seq_len, DEFAULT_MAX_SEQ_LEN)
    report("prepare")
    skeleton, weights = hollow(checkpoint, dtype)
    prepared = trace.prepare(skeleton, weights, reference, layout, max_seq_len, target.table.fused_experts)
    if any(scheme.activation_bits == 8 for scheme in checkpoint.quantization.values()):
        prepared = dataclasses.replace(prepared, spec=dataclasses.replace(prepared.spec, int8_activations=True))
    report("trace")
    program = trace.capture(prepared)
    report("lower")
    opset = settings.opset or target.opsets[-1]
    table = target.table(opset, prepared.spec.layout, settings.accuracy_level).table()
    model = translate(program, table, opset, trace.input_names(prepared.spec), trace.output_names(prepared.spec))
    target.finish(model, prepared.spec, weights)
    if settings.target == "ort" and settings.sensitive_accuracy_level != settings.accuracy_level:
        accuracy.set_sensitive(model, settings.sensitive_accuracy_level)
    return Built(model, prepared)


def verify_twin(checkpoint: Checkpoint, settings: ExportRecipe, staging: Path, reference: trace.Reference) -> dict[str, Any]:
    """The same graph in a type this machine computes in, verified and deleted again."""
    path = staging / "twin.onnx"
    _, verified = written(checkpoint, settings, layout_of(settings), reference, path, lambda step: None)
    for file in (path, Path(f"{path}.data")):
        file.unlink(missing_ok=True)
    return {**(verified or {}), "twin": settings.dtype}


def write_chunks(checkpoint: Checkpoint, settings: ExportRecipe, reference: trace.Reference, staging: Path) -> dict[str, Any]:
    """The variant with per-row query lengths; its weights are the ones already written."""
    built = build_graph(checkpoint, settings, "chunks", reference, lambda step: None)
    tiers = [tier for tier in built.prepared.facts["tiers"] if tier is not None]
    if any(tier != 1 for tier in tiers):
        raise UnsupportedError(
            f"chunks: every layer's attention must be the fused one, and this model has tiers {tiers}; leave chunks out"
        )
    finish.save_sharing(built.model, staging / CHUNKS_FILE, staging / MODEL_FILE)
    verified = verify_onnx(staging / CHUNKS_FILE, built.spec, reference, DTYPES[settings.dtype])
    return {"chunks_file": CHUNKS_FILE, "chunks_graph": built.spec.to_dict(), "chunks_verified": verified}


def input_scales(checkpoint: Checkpoint) -> list[float]:
    """Calibrated scales of the linears with 8-bit activations."""
    static = [n for n, s in checkpoint.quantization.items() if s.activation_bits == 8 and not s.dynamic_activations]
    return [float(checkpoint.tensor_for(f"{name}.input_scale")()) for name in static]


def hollow(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[torch.nn.Module, Weights]:
    """A fresh skeleton with hollow weights read from the checkpoint."""
    skeleton = checkpoint.skeleton(dtype)
    return skeleton, hollow_model(skeleton, lambda name: checkpoint.tensor_for(name, dtype))


def untouched_reference(checkpoint: Checkpoint, dtype: torch.dtype) -> trace.Reference:
    """The model's own answers, computed with one layer's weights in memory at a time."""
    skeleton, weights = hollow(checkpoint, dtype)
    with weights.streamed(skeleton), rounding.unrounded(skeleton):
        return trace.reference(skeleton, checkpoint.spec.vocab_size)
