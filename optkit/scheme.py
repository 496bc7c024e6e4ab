"""What "quantized" means: bits of the weights and of the activations, and how finely scales are shared.

``w = (code - zero_point) * scale`` for every scheme. ``code`` is an unsigned integer in ``[0, 2**num_bits - 1]``;
symmetric schemes have the fixed zero point ``2**(num_bits-1)``, so a *signed* scale may be negative: the largest
magnitude of a group then maps to the end of the range that has one more step (code 0), which uses the whole grid
(`llama.cpp Q4_0` does the same). Names: ``w4a16`` is 4-bit weights with 16-bit-or-wider activations; ``int4`` and ``int8``
are aliases of ``w4a16`` and ``w8a16``. "INT8" alone is ambiguous elsewhere: W8A16 and W8A8 differ in accuracy and speed.

A *shifted* scheme has a floating-point term beside the zero point, ``w = (code - zero_point) * scale + shift``: what is left
of an offset that is no multiple of the scale. Formats made elsewhere have it (GGUF's ``Q4_1`` and k-quants store a minimum);
optkit reads it and never chooses it.

Granularity: ``group`` shares a scale among ``group_size`` consecutive inputs of one output row, ``channel`` among a row.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from optkit.errors import RecipeError, UnsupportedError, UsageError, nearest

GROUP_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class QuantScheme:
    """How one weight matrix ``[O, I]`` is quantized.

    Attributes:
        num_bits: 4 or 8.
        symmetric: fixed zero point at mid-range; else one per scale.
        group_size: inputs that share a scale; ``None`` is one scale per output channel.
        activation_bits: 16 (activations stay floating point) or 8.
        dynamic_activations: with 8-bit activations: a scale per token found at run time, else a calibrated one.
        shifted: a floating-point term per scale beside the zero point; asymmetric schemes only.
    """

    num_bits: int
    symmetric: bool = True
    group_size: int | None = None
    activation_bits: int = 16
    dynamic_activations: bool = True
    shifted: bool = False

    def __post_init__(self) -> None:
        if self.num_bits not in (4, 8):
            raise UsageError(f"num_bits {self.num_bits}: optkit quantizes weights to 4 or 8 bits")
        if self.activation_bits not in (8, 16):
            raise UsageError(f"activation_bits {self.activation_bits}: 8 or 16")
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise UsageError(f"group_size {self.group_size}: use one of {', '.join(map(str, GROUP_SIZES))}, or channel")
        if self.activation_bits == 8 and (self.num_bits != 8 or self.group_size is not None or not self.symmetric):
            raise UsageError("8-bit activations go with symmetric 8-bit weights and one scale per channel (w8a8)")
        if self.shifted and self.symmetric:
            raise UsageError("a shift goes with zero points, so with an asymmetric scheme")

    @property
    def name(self) -> str:
        return f"w{self.num_bits}a{self.activation_bits}"

    @property
    def granularity(self) -> str:
        return "channel" if self.group_size is None else "group"

    @property
    def zero_point(self) -> int:
        """The fixed zero point of the symmetric case, in unsigned codes."""
        return 1 << (self.num_bits - 1)

    @property
    def code_max(self) -> int:
        return (1 << self.num_bits) - 1

    def groups(self, in_features: int) -> int:
        """Number of scales per output row, ``G``. Raises UsageError if the group size does not divide."""
        if self.group_size is None:
            return 1
        if in_features % self.group_size:
            raise UsageError(f"group_size {self.group_size} does not divide {in_features}")
        return in_features // self.group_size

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        kind = "sym" if self.symmetric else "asym shifted" if self.shifted else "asym"
        static = " static" if self.activation_bits == 8 and not self.dynamic_activations else ""
        return f"{self.name} {'channel' if self.group_size is None else f'g{self.group_size}'} {kind}{static}"


PRESETS: dict[str, QuantScheme] = {
    "w4a16": QuantScheme(num_bits=4, group_size=32),
    "w8a16": QuantScheme(num_bits=8, group_size=None),
    "w8a8": QuantScheme(num_bits=8, group_size=None, activation_bits=8),
}
ALIASES = {"int4": "w4a16", "int8": "w8a16"}
FLOATING = ("fp8", "float8", "f8", "fp4", "nvfp4", "mxfp4", "mxfp8")


def preset(name: str, **changes: Any) -> QuantScheme:
    """The scheme called ``name`` (or one of its aliases) with ``changes`` applied.

    Raises:
        RecipeError: unknown name, naming the nearest known one.
        UnsupportedError: a floating-point format of 8 or 4 bits.
    """
    key = str(name).lower()
    key = ALIASES.get(key, key)
    if any(part in key for part in FLOATING):
        raise UnsupportedError(
            f"scheme {name!r}: optkit quantizes to integers only; w8a8 runs 8-bit products on every GPU, w4a16 is the smallest"
        )
    if key not in PRESETS:
        known = (*PRESETS, *ALIASES)
        raise RecipeError(f"scheme {name!r} is not known{nearest(key, known)}; known: {', '.join(known)}")
    return replace(PRESETS[key], **changes)


def scheme_from_dict(data: Mapping[str, Any]) -> QuantScheme:
    return QuantScheme(**dict(data))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Does a module name match one of ``patterns``: the exact name, its last component, ``re:<regex>`` or a shell glob?"""
    import re

    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.search(pattern[3:], name):
                return True
        elif name == pattern or name.rsplit(".", 1)[-1] == pattern or fnmatch.fnmatchcase(name, pattern):
            return True
    return False


def check_group_sizes(linears: Mapping[str, tuple[int, int]], schemes: Mapping[str, QuantScheme]) -> None:
    """Raises UsageError, naming every layer and the sizes that do divide, if a group size does not fit its layer.

    Args:
        linears: module name -> ``(out_features, in_features)``.
        schemes: module name -> scheme, for the modules that will be quantized.
    """
    bad: dict[tuple[int, int], list[str]] = {}
    for name, scheme in schemes.items():
        size, inputs = scheme.group_size, linears[name][1]
        if size is not None and inputs % size:
            bad.setdefault((size, inputs), []).append(name)
    if not bad:
        return
    parts = []
    for (size, inputs), names in bad.items():
        fits = [str(g) for g in GROUP_SIZES if inputs % g == 0]
        remedy = f"use {' or '.join(fits)}, or channel" if fits else "use channel"
        parts.append(
            f"group_size {size} does not divide the {inputs} inputs of {len(names)} linears ({', '.join(names)}): {remedy}"
        )
    raise UsageError("; ".join(parts))
