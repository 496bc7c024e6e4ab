"""The ``quantize`` stage: a checkpoint in, a quantized checkpoint directory out, one tensor at a time.

Plan, solve, write. A *solver* (:class:`optkit.quantize.rtn.Rtn` and its subclasses, one per method) turns one matrix after the
other into codes and scales; the writer streams everything else through. Memory is that of the largest tensor, and whatever the
method itself needs. The directory is described in docs/quantized-checkpoint.md.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from optkit import manifest
from optkit.checkpoint.affine import QuantizedWeight, dequantize, row_parts
from optkit.checkpoint.model import Checkpoint, open_checkpoint
from optkit.checkpoint.store import quantization_config
from optkit.errors import RecipeError, UnsupportedError, UsageError, VerificationError
from optkit.quantize.plan import Plan, make_plan
from optkit.quantize.rtn import CHUNK, Rtn
from optkit.quantize.write import Writer
from optkit.recipe import METHODS as KNOWN
from optkit.recipe import QuantizeRecipe, parse_section

# Method -> (module, class). The class is an Rtn that overrides quantize(module) -> QuantizedWeight for the linears it can do
# better, changed(parameter) -> Tensor | None for floating-point parameters it edits (a norm that takes up a smoothing scale),
# target(module) for what its weights approximate after such an edit, and facts() for the manifest. It does its calibration in
# __init__.
METHODS: dict[str, tuple[str, str]] = {
    "rtn": ("rtn", "Rtn"),
    "gptq": ("methods", "Gptq"),
    "awq": ("methods", "Awq"),
    "awq+gptq": ("methods", "AwqGptq"),
    "autoround": ("autoround", "AutoRound"),
    "smoothquant": ("smoothquant", "SmoothQuant"),
    "auto": ("mixed", "Auto"),
    "mixed": ("mixed", "Mixed"),  # what ``max_kl`` asks for
}
LIBRARIES = ("torch", "transformers", "compressed-tensors", "safetensors", "numpy")

Progress = Callable[..., None]


def quantize(
    checkpoint: str | Path | Checkpoint,
    recipe: QuantizeRecipe | Mapping[str, Any] | None = None,
    out_dir: str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Path:
    """Writes ``checkpoint`` as a quantized checkpoint in the compressed-tensors format.

    Args:
        checkpoint: a HF directory, hub id, GGUF file or an open checkpoint.
        recipe: the ``quantize`` section, as an object or a mapping; the defaults when left out.
        out_dir: the directory to make; an optkit directory there is replaced, once the new one is complete.
        progress: called with ``(text, done, total)``.
        options: keys of the section, which override ``recipe``: ``quantize("dir", out_dir="q", scheme="w8a16")``.

    Returns:
        ``out_dir``.

    Raises:
        RecipeError: unknown key or value.
        CheckpointError: the model is missing or damaged.
        UsageError: a group size does not divide (names every layer), policies contradict each other, no ``out_dir``.
        UnsupportedError: a method that is not available, or a checkpoint that is quantized already.
        StorageError: disk full or not writable; nothing is left behind.
        VerificationError: a method gave an answer that cannot be right.
    """
    section = resolve(recipe, options)
    if out_dir is None:
        raise UsageError("quantize: out_dir is missing; name the directory to write")
    report = progress or (lambda *_: None)
    report("opening checkpoint")
    source = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    if source.gguf is not None:
        source = source.dequantized()  # what a GGUF file has in blocks is often the only form of a model there is
    if source.quantization:
        raise UnsupportedError(f"{source.given}: is quantized already; give the floating-point checkpoint")
    method = load_method(section.method if section.max_kl is None else "mixed")
    plan = make_plan(source, section)
    with manifest.staged_directory(out_dir) as staging, torch.no_grad():
        solver = method(source, plan, section, report)
        writer = Writer(source, plan, staging)
        errors = write_modules(plan, solver, writer, report)
        writer.rest(solver.changed)
        write_config(source, plan, writer, staging)
        manifest.write_manifest(staging, describe(source, plan, section, solver, writer, errors))
    solver.close()
    return Path(out_dir)


def resolve(recipe: QuantizeRecipe | Mapping[str, Any] | None, options: Mapping[str, Any]) -> QuantizeRecipe:
    """The section from an object or mapping, with ``options`` on top."""
    if isinstance(recipe, Mapping):
        section: QuantizeRecipe = parse_section(QuantizeRecipe, {**recipe, **options}, "quantize")
        return section
    base = recipe or QuantizeRecipe()
    if not isinstance(base, QuantizeRecipe):
        raise RecipeError(f"quantize: the recipe is a mapping or a QuantizeRecipe, not {type(base).__name__}")
    given: QuantizeRecipe = parse_section(QuantizeRecipe, options, "quantize")
    return dataclasses.replace(base, **{key: getattr(given, key) for key in options})


def load_method(name: str) -> type[Rtn]:
    """The solver class of a method.

    Raises:
        UnsupportedError: unknown, or not in this installation.
    """
    if name not in METHODS:
        raise UnsupportedError(f"method {name!r} is not known; known: {', '.join(KNOWN)}")
    module, solver = METHODS[name]
    try:
        found: type[Rtn] = getattr(importlib.import_module(f"optkit.quantize.{module}"), solver)
    except (ModuleNotFoundError, AttributeError) as error:
        raise UnsupportedError(f"method {name!r} is not available in this optkit ({error}); use rtn") from error
    return found


def write_modules(plan: Plan, solver: Rtn, writer: Writer, report: Progress) -> dict[str, dict[str, float]]:
    """Quantizes and writes one module after the other; returns the weight error of each."""
    errors: dict[str, dict[str, float]] = {}
    for module in plan.schemes:
        report("quantizing", len(errors), len(plan.schemes))
        quantized = solver.quantize(module)
        check(module, quantized, plan)
        errors[module] = weight_error(solver.target(module), quantized)
        writer.quantized(module, quantized)
    report("quantizing", len(errors), len(plan.schemes))
    return errors


def check(module: str, quantized: QuantizedWeight, plan: Plan) -> None:
    """Raises VerificationError if a method's answer is not what the plan says, or would not compute."""
    if quantized.scheme != plan.schemes[module]:
        wanted = plan.schemes[module].describe()
        raise VerificationError(f"{module}: was quantized as {quantized.scheme.describe()}, and the plan says {wanted}")
    if tuple(quantized.codes.shape) != plan.shapes[module]:
        raise VerificationError(f"{module}: came back as {list(quantized.codes.shape)}, and is {list(plan.shapes[module])}")
    if not bool((quantized.scale.isfinite() & (quantized.scale != 0)).all()):
        raise VerificationError(f"{module}: has a scale that is zero, NaN or infinite")


def weight_error(weight: torch.Tensor, quantized: QuantizedWeight) -> dict[str, float]:
    """Relative squared error ``|W - Q|² / |W|²`` and, unless there is none, the same as a signal-to-noise ratio in dB."""
    noise = signal = 0.0
    rows = max(1, CHUNK // weight.shape[1])
    for part, quantized_part in zip(weight.split(rows), row_parts(quantized, rows), strict=True):
        signal += float(part.square().sum(dtype=torch.float64))
        noise += float(dequantize(quantized_part).sub_(part).square_().sum(dtype=torch.float64))
    if not noise or not signal:
        return {"relative_error": 0.0 if not noise else math.inf}
    return {"relative_error": noise / signal, "sqnr_db": -10 * math.log10(noise / signal)}


def write_config(source: Checkpoint, plan: Plan, writer: Writer, staging: Path) -> None:
    """Writes config.json, with what is stored packed described in it, and the tokenizer's files."""
    packed = {name: scheme for name, scheme in plan.schemes.items() if writer.packs(name)}
    changes: dict[str, Any] = {"tie_word_embeddings": False} if plan.tied == "untie" else {}
    if packed:
        dense = [name for name in plan.shapes if name not in packed and name != plan.embedding]
        changes["quantization_config"] = quantization_config(packed, dense)
    source.copy_support_files(staging, **changes)


def describe(
    source: Checkpoint, plan: Plan, section: QuantizeRecipe, solver: Rtn, writer: Writer, errors: Mapping[str, Any]
) -> manifest.Manifest:
    """The manifest of the new directory."""
    facts = {
        "method": section.method,
        "tied": plan.tied,
        "embedding": plan.embedding,
        "lm_head": plan.lm_head,
        "schemes": {name: scheme.describe() for name, scheme in plan.schemes.items()},
        "codes": {name: scheme.to_dict() for name, scheme in plan.schemes.items() if not writer.packs(name)},
        "floating": list(plan.floating),
        "unused_tensors": source.unused_tensors(),
        "layers": dict(errors),
        **solver.facts(),
    }
    return manifest.Manifest(
        kind="quantized-checkpoint",
        source={"digest": source.digest, "given": source.given},
        recipe={"quantize": dataclasses.asdict(section)},
        versions=manifest.library_versions(*LIBRARIES),
        model=dataclasses.replace(source.spec, tied_embeddings=plan.ties),
        facts=facts,
    )
