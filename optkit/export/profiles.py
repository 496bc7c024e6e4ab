"""Optimization profiles solved from the symbolic dimensions of a graph, and what TensorRT's kernels require of a model.

TensorRT compiles for shape ranges: a *profile* gives minimum, optimum and maximum for every dynamic input. The ranges of
different inputs are not independent. A mask over ``past_sequence_length + sequence_length`` whose optimum is not the sum
of the two other optima is refused with "kOPT violates shape constraints" (NVIDIA/TensorRT#1808, GPT-2 with past). So
ranges are given to the *symbols*, once per profile, and a derived dimension is computed from them: at the minimum from
the minima, at the optimum from the optima, at the maximum from the maxima. A dimension may be a number, a symbol, or a sum
of products, as exporters write it: ``past_sequence_length + sequence_length``, ``2*s0 + 1``.

Two profiles are made: ``prefill`` (1..max_prefill new tokens) and ``decode`` (exactly one new token), each for 1..max_batch
rows. A profile with a single shape per dimension lets the builder choose kernels for that very shape, and CUDA graphs can
be captured for it.

The kernel table at the end is what TensorRT-RTX 1.7.1 accepted when every entry was built (``tests/trt_cases.py`` builds
them again); it is asked before anything expensive runs. TensorRT-LLM's users met such limits hours into a build
(TensorRT-LLM#1770, #1792, #1580, #962, #1191: AWQ builds failing by shape or vocabulary padding).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from optkit import io_spec
from optkit.errors import LimitError, UnsupportedError, UsageError

Dims = tuple[int | str, ...]
Shape = tuple[int, ...]

#: derived symbol -> its definition, for graphs that only write the name
RELATIONS = {
    io_spec.TOTAL: f"{io_spec.PAST} + {io_spec.SEQUENCE}",
    io_spec.PRESENT: f"{io_spec.PAST} + {io_spec.SEQUENCE}",
}


@dataclass(frozen=True)
class Range:
    """Minimum, optimum and maximum of one symbol."""

    low: int
    best: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.best <= self.high:
            raise UsageError(f"profile range {self.low}..{self.best}..{self.high}: needs 0 <= min <= opt <= max")

    def __getitem__(self, index: int) -> int:
        return (self.low, self.best, self.high)[index]


@dataclass(frozen=True)
class Profile:
    """One optimization profile: for every dynamic input its ``(min, opt, max)`` shapes."""

    name: str
    shapes: Mapping[str, tuple[Shape, Shape, Shape]]
    symbols: Mapping[str, Range] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        return {"name": self.name, "shapes": dict(self.shapes), "symbols": {k: asdict(v) for k, v in self.symbols.items()}}


def evaluate(dim: int | str, values: Mapping[str, int], relations: Mapping[str, str] = RELATIONS) -> int:
    """The number a dimension stands for when the symbols have ``values``.

    Raises:
        UnsupportedError: the expression is more than sums of products, or a symbol has no value.
    """
    if isinstance(dim, int):
        return dim
    total = 0
    for term in dim.replace("-", "+-").split("+"):
        product = 1
        for factor in filter(None, re.split(r"[*\s]+", term)):
            sign = -1 if factor.startswith("-") else 1
            product *= sign * _factor(factor.lstrip("-"), values, relations, dim)
        total += product if term.strip() else 0
    return total


def _factor(text: str, values: Mapping[str, int], relations: Mapping[str, str], dim: str) -> int:
    if text == "" or text.isdigit():
        return int(text or 1)
    if text in values:
        return values[text]
    if text in relations:
        return evaluate(relations[text], values, {k: v for k, v in relations.items() if k != text})
    raise UnsupportedError(
        f"dimension {dim!r}: the symbol {text!r} has no range; give it one with symbols={{{text!r}: Range(...)}}"
    )


def free_symbols(inputs: Mapping[str, Dims], relations: Mapping[str, str] = RELATIONS) -> set[str]:
    """The symbols that need a range: every one in ``inputs`` that no relation defines, and those the relations use."""
    found: set[str] = set()
    pending = [d for dims in inputs.values() for d in dims if isinstance(d, str)]
    seen = set(pending)
    while pending:
        for name in re.findall(r"[A-Za-z_][\w.]*", pending.pop()):
            definition = relations.get(name)
            if definition is None:
                found.add(name)
            elif definition not in seen:
                seen.add(definition)
                pending.append(definition)
    return found


def solve_profile(
    name: str, inputs: Mapping[str, Dims], symbols: Mapping[str, Range], relations: Mapping[str, str] = RELATIONS
) -> Profile:
    """The profile that gives every dynamic input consistent shapes.

    Raises:
        UnsupportedError: a symbol without a range, naming the input.
        UsageError: a dimension comes out negative.
    """
    shapes: dict[str, tuple[Shape, Shape, Shape]] = {}
    for tensor, dims in inputs.items():
        if all(isinstance(d, int) for d in dims):
            continue
        try:
            low, best, high = (
                tuple(evaluate(d, {s: r[i] for s, r in symbols.items()}, relations) for d in dims) for i in range(3)
            )
        except UnsupportedError as error:
            raise UnsupportedError(f"profile {name}, input {tensor} {list(dims)}: {error}") from error
        if min(low) < 0 or any(not a <= b <= c for a, b, c in zip(low, best, high, strict=True)):
            raise UsageError(
                f"profile {name}, input {tensor} {list(dims)}: shapes {low}..{best}..{high} are not min <= opt <= max"
            )
        shapes[tensor] = (low, best, high)
    return Profile(name, shapes, dict(symbols))


def solve_profiles(
    inputs: Mapping[str, Dims],
    *,
    max_seq_len: int,
    max_batch: int = 1,
    max_prefill: int | None = None,
    symbols: Mapping[str, Range] | None = None,
    relations: Mapping[str, str] = RELATIONS,
) -> tuple[Profile, Profile]:
    """The prefill and the decode profile of a language model graph.

    Args:
        inputs: graph input -> its dimensions, numbers and symbols, as :func:`optkit.export.lint.graph_inputs` reads them.
        max_seq_len: cached positions, ``S_max``; for a static cache it must be what the graph has.
        max_batch: largest number of rows; the smallest is 1.
        max_prefill: most new tokens in one run (a longer prompt is fed in pieces); default ``max_seq_len``.
        symbols: ranges of further symbols, or other ranges for the known ones (both profiles).
        relations: derived symbols.

    Raises:
        UsageError: sizes that make no sense. UnsupportedError: a symbol nobody gave a range.
    """
    max_prefill = max_seq_len if max_prefill is None else max_prefill
    if max_batch < 1 or max_seq_len < 1:
        raise UsageError(f"max_batch {max_batch} and max_seq_len {max_seq_len}: both at least 1")
    if not 1 <= max_prefill <= max_seq_len:
        raise UsageError(f"max_prefill {max_prefill}: from 1 to max_seq_len ({max_seq_len})")
    fresh = max_prefill
    batch = Range(1, 1, max_batch)
    prefill = {
        io_spec.BATCH: batch,
        io_spec.SEQUENCE: Range(1, max(1, fresh // 4), fresh),
        io_spec.PAST: Range(0, 0, max_seq_len),  # a full row's neighbours may go on: see runtime/backends/_trt_growing.py
        io_spec.LOGITS_COUNT: Range(1, 1, fresh),
    }
    decode = {
        io_spec.BATCH: batch,
        io_spec.SEQUENCE: Range(1, 1, 1),
        io_spec.PAST: Range(0, max_seq_len // 2, max_seq_len),
        io_spec.LOGITS_COUNT: Range(1, 1, 1),
    }
    extra = dict(symbols or {})
    return (
        solve_profile("prefill", inputs, {**prefill, **extra}, relations),
        solve_profile("decode", inputs, {**decode, **extra}, relations),
    )


# ---------------------------------------------------------------- what the kernels require

#: compute capabilities TensorRT-RTX 1.7 compiles for. There is no 9.0: Hopper needs standard TensorRT.
RTX_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
#: what is compiled for when nothing is asked: Ampere, Ada and Blackwell consumer cards
RTX_DEFAULT_CAPABILITIES = ("8.6", "8.9", "12.0")
#: element type -> capabilities without it (dtype names as ONNX IR spells them, upper case)
LACKING = {
    "INT4": frozenset({"7.5"}),
    "BFLOAT16": frozenset({"7.5"}),
    "FLOAT8E4M3FN": frozenset({"7.5", "8.0", "8.6"}),
}
#: INT4 block sizes optkit writes for TensorRT; others (8, 24, 48, 96, 256 were tried) build, their kernels are unproven
INT4_BLOCKS = (16, 32, 64, 128)
#: the fused attention kernels of half precision take head_dim in this range, in steps of 8
FUSED_HEAD_DIM = (16, 256)
TOPK_LIMIT = 3840


def parse_capabilities(text: str | Iterable[str], flavour: str = "tensorrt_rtx") -> tuple[str, ...]:
    """``"8.6,8.9"`` (or ``86``, ``sm_86``) as ``("8.6", "8.9")``.

    Raises:
        UsageError: not a compute capability.
        UnsupportedError: one that TensorRT-RTX does not compile for; says what does.
    """
    items = text.split(",") if isinstance(text, str) else list(text)
    found: list[str] = []
    for item in items:
        match = re.fullmatch(r"(?:sm_?|SM_?)?(\d{1,2})\.?(\d)", str(item).strip())
        if match is None:
            raise UsageError(f"compute capability {item!r}: write it like 8.6, and several as 8.6,8.9,12.0")
        value = f"{int(match[1])}.{match[2]}"
        if flavour == "tensorrt_rtx" and value not in RTX_CAPABILITIES:
            hint = (
                "use standard TensorRT (flavour tensorrt) on that GPU"
                if value in ("9.0", "10.0", "10.3")
                else "choose one of these"
            )
            raise UnsupportedError(
                f"TensorRT-RTX does not compile for {value} (it does for {', '.join(RTX_CAPABILITIES)}): {hint}"
            )
        if value not in found:
            found.append(value)
    if not found:
        raise UsageError("no compute capability given; write them like 8.6,8.9,12.0")
    return tuple(found)


def kernel_limits(
    *,
    head_dim: int,
    weight_bits: int = 16,
    group_size: int | None = None,
    symmetric: bool = True,
    dtype: str = "fp16",
    widths: Mapping[str, int] | None = None,
    capabilities: Sequence[str] = (),
) -> list[str]:
    """Reasons why TensorRT will not build a model, or not with its fast kernels; empty when all is well.

    Asked with the model's facts before quantization starts.

    Args:
        head_dim: of the attention layers (0: none).
        weight_bits, group_size, symmetric: of the quantized linears.
        dtype: fp16, bf16 or fp32 activations.
        widths: linear -> in_features, to find those a group does not divide.
        capabilities: what will be compiled for.
    """
    reasons = []
    if weight_bits < 16 and not symmetric:
        reasons.append("asymmetric weights: TensorRT takes no zero point; use symmetric: true")
    for name, inputs in (widths or {}).items():
        if group_size and inputs % group_size:
            reasons.append(
                f"{name}: group_size {group_size} does not divide its {inputs} inputs; use a divisor or pad the weights"
            )
    if weight_bits == 4 and group_size not in (None, *INT4_BLOCKS):
        sizes = ", ".join(map(str, INT4_BLOCKS))
        reasons.append(f"INT4 group_size {group_size}: builds, but nothing is known of its kernels; use {sizes}")
    kinds = {"INT4"} if weight_bits == 4 else set()
    kinds |= {"BFLOAT16"} if dtype == "bf16" else set()
    for kind in sorted(kinds):
        lacking = sorted(set(capabilities) & LACKING[kind])
        if lacking:
            reasons.append(f"compute capability {', '.join(lacking)} has no {kind}; leave it out or use another dtype")
    if head_dim and attention_support(head_dim, dtype) == "none":
        reasons.append(f"head_dim {head_dim}: no attention kernel; the exporter has to write MatMul and Softmax instead")
    return reasons


def attention_support(head_dim: int, dtype: str, masked: bool = True) -> str:
    """``fused`` (a dedicated kernel), ``decomposed`` (builds when the layer is marked decomposable) or ``none``.

    With a mask, half precision rows must be whole units of 16 bytes, decomposed or not.
    """
    half = dtype in ("fp16", "bf16", "FLOAT16", "BFLOAT16")
    if half and masked and head_dim % 8:
        return "none"
    low, high = FUSED_HEAD_DIM
    return "fused" if half and low <= head_dim <= high and head_dim % 8 == 0 else "decomposed"


def check_static_cache(inputs: Mapping[str, Dims], max_seq_len: int) -> None:
    """Raises LimitError if a static cache of the graph holds fewer than ``max_seq_len`` positions."""
    for name, dims in inputs.items():
        if name.startswith("past_key_values.") and len(dims) == 4 and isinstance(dims[2], int) and dims[2] < max_seq_len:
            raise LimitError(f"{name}: the graph's cache holds {dims[2]} positions, and profiles for {max_seq_len} were asked")
