"""Names, dtypes and symbolic axes of an exported graph: the contract between ``export`` and ``runtime``.

Names are the ones optimum, onnxruntime-genai and transformers.js expect: ``input_ids``, ``attention_mask``,
``past_key_values.{i}.key`` / ``.value``, ``present.{i}.key`` / ``.value``, ``logits``. A graph keeps one of these *layouts*:

``slots``    (targets ``ort`` and ``onnx``) Rows are right padded; a token's position is its slot in the cache.
             ``attention_mask [B, T]`` has a row's valid length as its number of ones (ones first). A first prompt has
             ``T == S``. With a past, the new tokens of row ``b`` go to slots ``sum(mask[b]) - S ..``; B = 1, or S = 1.
             ``past`` has a capacity ``P >= T`` chosen by the caller; the graph writes the new slots, ``present`` has the
             same shape and is bound to the very same memory.
``chunks``   (target ``ort``) ``past_lens [B]`` and ``query_lens [B]`` instead of the mask: every row brings
             ``query_lens[b]`` (0..S) new tokens and has ``past_lens[b]`` in the cache, so prefill, decode and idle rows
             share a run. Cache buffers as in ``slots``.
``scatter``  (target ``tensorrt``) ``position_ids [B, S]``, ``write_indices [B]`` (the row's cached length) and
             ``query_lens [B]`` (its new tokens, 1..S); caches have a static length ``S_max`` = max_seq_len.
``growing``  past [.., P, ..] in, present [.., P + S, ..] out, left padded ``attention_mask [B, P + S]`` (the fallback for
             models whose own attention code assumes it, and what other exporters write).

``logits_positions [N]`` int64 says which of the new tokens get logits, the same for every row: ``-1`` is the row's last valid
one, ``-2`` the one before it; ``0..S-1`` count from the left. ``logits`` is ``[B, N, V]``. It is an optional input of
``slots`` and ``chunks`` (an ONNX initializer that may be overridden; default ``[-1]``) and a required one of ``scatter``
(TensorRT makes an input with a default a constant). All inputs of integers are int64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: the ONNX Runtime session option for graphs that multiply int8 by int8: on x86 CPUs without VNNI sums of two products
#: otherwise saturate at 16 bits, which is wrong; without effect on other CPUs. It needs explicit zero points in the graph.
EXACT_INT8 = ("session.x64quantprecision", "1")

LAYOUTS = ("slots", "chunks", "scatter", "growing")

INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
POSITION_IDS = "position_ids"
WRITE_INDICES = "write_indices"
PAST_LENS = "past_lens"
QUERY_LENS = "query_lens"
LOGITS_POSITIONS = "logits_positions"
LOGITS = "logits"

BATCH = "batch_size"
SEQUENCE = "sequence_length"
TOTAL = "total_sequence_length"
PAST = "past_sequence_length"
PRESENT = "present_sequence_length"
LOGITS_COUNT = "logits_count"


def past_name(layer: int, role: str) -> str:
    return f"past_key_values.{layer}.{role}"


def present_name(layer: int, role: str) -> str:
    return f"present.{layer}.{role}"


@dataclass(frozen=True)
class CacheSpec:
    """One cache tensor of one layer.

    Attributes:
        layer: layer index.
        role: ``key``, ``value``, or the name of a fixed-size state (``conv_state``, ``recurrent_state``).
        shape: sizes with the batch first; the growing axis of a key/value cache holds ``None``.
        dtype: numpy name, for instance ``float32``.
        window: attention window in tokens (the current token included), or ``None``.
    """

    layer: int
    role: str
    shape: tuple[int | None, ...]
    dtype: str
    window: int | None = None

    @property
    def past(self) -> str:
        return past_name(self.layer, self.role)

    @property
    def present(self) -> str:
        return present_name(self.layer, self.role)

    @property
    def growing_axis(self) -> int | None:
        """The axis of the cached length, ``None`` for a fixed-size state. The batch axis is 0 and holds ``None`` as well."""
        axes = [i for i, n in enumerate(self.shape) if i and n is None]
        return axes[0] if axes else None

    def sizes(self, batch: int, length: int) -> tuple[int, ...]:
        """The concrete shape for ``batch`` rows and ``length`` cached tokens."""
        return (batch, *(length if n is None else n for n in self.shape[1:]))


@dataclass(frozen=True)
class GraphSpec:
    """What a graph takes and gives.

    Attributes:
        layout: one of :data:`LAYOUTS`.
        caches: every cache tensor, in input order.
        logits_dtype: numpy name of the logits.
        optional_logits_positions: the graph has the ``logits_positions`` input.
        max_seq_len: positions the graph supports (rotary tables, or the static cache length).
        rope_switch: length in tokens above which the model uses another rotary table for *all* positions (longrope): a session
            whose row grows past it re-reads the row's tokens in one prefill; ``None`` for every other model.
        int8_activations: the graph multiplies int8 activations by int8 weights; see :data:`EXACT_INT8`.
    """

    layout: str
    caches: tuple[CacheSpec, ...]
    logits_dtype: str
    max_seq_len: int
    optional_logits_positions: bool = True
    rope_switch: int | None = None
    extra_inputs: tuple[str, ...] = field(default=())
    int8_activations: bool = False

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout {self.layout!r}: one of {', '.join(LAYOUTS)}")

    @property
    def recurrent(self) -> bool:
        """Has fixed-size state, which cannot be truncated."""
        return any(c.growing_axis is None for c in self.caches)

    def cache_bytes(self, batch: int, length: int) -> int:
        import math

        width = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int64": 8, "float64": 8}
        return sum(math.prod(c.sizes(batch, length)) * width[c.dtype] for c in self.caches)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GraphSpec:
        caches = tuple(CacheSpec(**{**c, "shape": tuple(c["shape"])}) for c in data["caches"])
        return cls(**{**data, "caches": caches, "extra_inputs": tuple(data.get("extra_inputs", ()))})
