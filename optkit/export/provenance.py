"""What our functions know while the model's own code runs: one :class:`Capture` per forward.

The exporter recognises things by *provenance*, never by pattern: a function of ours hands a tensor to the model and finds
the very same object in its arguments later. A :class:`Capture` keeps those tensors with a record of what they are, and
where the new tokens sit (``past_lens``, ``query_lens``), so that cache, mask, rotary and attention agree.

Checks that look at values (is this mask function exactly a sliding window?) need real tensors, so they run in an eager
forward first and their results, the :class:`Plan`, are replayed while tracing: same calls, same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from optkit.export import ops  # noqa: F401  registers torch.ops.optkit


@dataclass
class Plan:
    """What eager probes found, for the traced run.

    Attributes:
        layout: of io_spec.LAYOUTS.
        fused: per cache layer, whether the attention function receives the cache's own tensors (tier 1).
        mask_windows: per mask call: 0 plain causal, n a sliding window of n, ``None`` something else.
        additive_masks: the model's own attention code adds the mask, so it is floating point.
        row_lengths: the model computes positions from the cache's length, so that is told by row (row_lengths.py).
        recording: an eager run that fills the fields above.
        rounding: 8-bit activations are rounded: in the traced run. The eager ones leave that out, see rounding.py.
    """

    layout: str
    fused: list[bool]
    mask_windows: list[int | None] = field(default_factory=list)
    additive_masks: bool = False
    row_lengths: bool = False
    recording: bool = True
    rounding: bool = False


@dataclass
class Tokens:
    """Where the tokens of this step are.

    Attributes:
        position_ids: ``[B, S]`` int64.
        query_slots: ``[B, S]`` int64, the cache slot of each new token (equal to the position but for left padding).
        past_lens, query_lens: ``[B]`` int64.
        valid: ``[B, T]`` int64, ones at the slots that hold a token of the row after this step.
    """

    position_ids: Tensor
    query_slots: Tensor
    past_lens: Tensor
    query_lens: Tensor
    valid: Tensor


class Capture:
    """Lives for one forward; see the module docstring."""

    current: ClassVar[Capture | None] = None

    def __init__(self, plan: Plan, tokens: Tokens, logits_positions: Tensor | None) -> None:
        self.plan, self.tokens, self.logits_positions = plan, tokens, logits_positions
        self._tags: dict[tuple[int, str], tuple[Tensor, dict[str, Any]]] = {}
        self._masks: dict[int, Tensor] = {}
        self._mask_calls = 0
        self.shared: dict[str, Any] = {}  # things made once per forward, by name
        self.attention_layers: list[int | None] = []  # layer of each call of our attention function
        self.calls: list[dict[str, Any]] = []  # what each of them was asked to do (features.py)
        self.norms: list[tuple[Any, bool]] = []  # our norm modules that ran, and whether head by head
        self.unfused: dict[int | None, str] = {}  # layer -> why its attention is not tier 1

    @classmethod
    def require(cls) -> Capture:
        if cls.current is None:
            raise RuntimeError("optkit's attention runs only inside an optkit export")
        return cls.current

    @contextlib.contextmanager
    def active(self) -> Iterator[Capture]:
        previous, Capture.current = Capture.current, self
        try:
            yield self
        finally:
            Capture.current = previous

    def tag(self, tensor: Tensor, kind: str, **record: Any) -> Tensor:
        """Remembers what ``tensor`` is (kept alive, so that its id stays its own); it may be several kinds of thing."""
        self._tags[id(tensor), kind] = (tensor, record)
        return tensor

    def look(self, tensor: Tensor | None, kind: str) -> dict[str, Any] | None:
        """The record of a tensor handed out before, if it is that very object."""
        if tensor is None:
            return None
        hit = self._tags.get((id(tensor), kind))
        return hit[1] if hit is not None and hit[0] is tensor else None

    def mask_window(self, found: int | None) -> int | None:
        """Records a mask call's window in an eager run; replays it in a traced one."""
        if self.plan.recording:
            self.plan.mask_windows.append(found)
            return found
        window = self.plan.mask_windows[self._mask_calls]
        self._mask_calls += 1
        return window

    def causal_mask(self, window: int) -> Tensor:
        """bool ``[B, 1, S, T]``: key slot at or before the query's, inside the window (the query included), and valid."""
        if window not in self._masks:
            query = self.tokens.query_slots[:, None, :, None]
            key = torch.arange(self.tokens.valid.shape[1])[None, None, None, :]
            mask = key <= query
            if window > 0:
                mask = mask & (key > query - window)
            if self.plan.layout == "growing":
                mask = mask & (self.tokens.valid[:, None, None, :] != 0)
                mask = mask | (key == query)  # padding sees itself: a query that sees nothing is NaN in some runtimes
            self._masks[window] = self.tag(mask, "mask", window=window)
        return self._masks[window]


def slots_tokens(input_ids: Tensor, attention_mask: Tensor) -> Tokens:
    """``slots``: right padded; see io_spec."""
    past = torch.ops.optkit.slot_past(input_ids, attention_mask)
    positions = past[:, None] + torch.arange(input_ids.shape[1])[None]
    return Tokens(positions, positions, past, attention_mask.sum(1) - past, attention_mask)


def chunk_tokens(input_ids: Tensor, past_lens: Tensor, query_lens: Tensor, capacity: int | torch.SymInt) -> Tokens:
    """``chunks``: T is the capacity of the buffers."""
    positions = past_lens[:, None] + torch.arange(input_ids.shape[1])[None]
    valid = (torch.arange(capacity)[None] < (past_lens + query_lens)[:, None]).to(torch.int64)  # type: ignore[arg-type]
    return Tokens(positions, positions, past_lens, query_lens, valid)


def scatter_tokens(
    input_ids: Tensor, position_ids: Tensor, write_indices: Tensor, query_lens: Tensor, capacity: int | torch.SymInt
) -> Tokens:
    """``scatter``: static buffers; all S tokens of a row, padding included, are written at ``write_indices``."""
    valid = (torch.arange(capacity)[None] < (write_indices + query_lens)[:, None]).to(torch.int64)  # type: ignore[arg-type]
    return Tokens(position_ids, position_ids, write_indices, query_lens, valid)


def growing_tokens(input_ids: Tensor, attention_mask: Tensor) -> Tokens:
    """``growing``: left padded, the new tokens are the last S columns."""
    new, total = input_ids.shape[1], attention_mask.shape[1]
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, total - new :]
    slots = (torch.arange(new) + (total - new))[None].expand(input_ids.shape[0], new)
    past = torch.full_like(attention_mask[:, 0], 1) * (total - new)
    return Tokens(positions, slots, past, torch.full_like(past, 1) * new, attention_mask)
