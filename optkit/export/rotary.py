"""Rotary embeddings: the model's module as tables, its ``apply_rotary*`` functions as one op.

A rotary module has no parameters and is called with ``position_ids``. Its answers for all positions, asked of the module
itself, become tables; where they change with the length of the sequence, two tables (longrope) or a table of frequencies
(dynamic scaling). The functions that apply them are classified on random tensors: rotate halves or pairs, of all or the first
dimensions, with cosines as the module repeats them or as complex numbers. What does not fit stays the model's own code.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from optkit.errors import UnsupportedError
from optkit.export import ops
from optkit.export.provenance import Capture
from optkit.export.substitute import children

_OPS = torch.ops.optkit


class DependsOnLength(Exception):
    """A rotary module's answers for the first positions change with every further one."""


class ExportRotary(nn.Module):
    """The model's rotary module as tables ``[positions, R/2]``, filled by itself.

    ``switch``: the length above which the module answers from another table (longrope), or ``None``. Rows whose length after
    this step exceeds it read the second half of a table of twice the length. A module whose frequencies change with every
    length (dynamic scaling) gets a table of frequencies by length, and the angles are computed in the graph: new tokens turn by
    their row's length after this step, and cached keys stay as they were, which is what transformers' cached decoding does.
    """

    def __init__(self, inner: nn.Module, max_seq_len: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._inner = [inner]  # a list, so that it is not a submodule
        self.max_seq_len, self.dtype = max_seq_len, dtype
        self.tables: dict[Any, tuple[str, str, int | None]] = {}
        self.by_length: dict[Any, tuple[str, str, float]] = {}

    def original(self, count: int, *args: Any, **kwargs: Any) -> Any:
        """What the module answers for positions ``0..count-1``."""
        with torch.no_grad():
            return self._inner[0](torch.zeros(1, 1, 1, dtype=self.dtype), torch.arange(count)[None], *args, **kwargs)

    def table(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, str, int | None]:
        """``(cos, sin, layout, switch)`` for a call with these further arguments."""
        key = (args, tuple(sorted(kwargs.items())))
        if key not in self.tables:
            cos, sin, layout = compact(self.original(self.max_seq_len, *args, **kwargs))
            switch = self._switch(cos, args, kwargs)
            if switch is not None:
                below = compact(self.original(switch, *args, **kwargs))
                pad = torch.zeros(self.max_seq_len - switch, cos.shape[1], dtype=cos.dtype)
                cos, sin = torch.cat([below[0], pad, cos]), torch.cat([below[1], pad, sin])
            prefix = f"table{len(self.tables)}"
            self.register_buffer(prefix + "_cos", cos.contiguous().clone(), persistent=False)
            self.register_buffer(prefix + "_sin", sin.contiguous().clone(), persistent=False)
            self.tables[key] = (prefix, layout, switch)
        prefix, layout, switch = self.tables[key]
        return getattr(self, prefix + "_cos"), getattr(self, prefix + "_sin"), layout, switch

    def frequencies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, str, float] | None:
        """``(frequencies [max_seq_len + 1, R/2], layout, scale of cos and sin)``; ``None`` for a module with tables."""
        key = (args, tuple(sorted(kwargs.items())))
        if key in self.tables:
            return None
        if key not in self.by_length:
            try:
                self.table(args, kwargs)
                return None
            except DependsOnLength:
                table, layout, scale = self._frequencies(args, kwargs)
            prefix = f"frequencies{len(self.by_length)}"
            self.register_buffer(prefix, table, persistent=False)
            self.by_length[key] = (prefix, layout, scale)
        prefix, layout, scale = self.by_length[key]
        return getattr(self, prefix), layout, scale

    def _frequencies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, str, float]:
        """Asks the module at every length, each time after a short one, since such modules remember the longest they saw.

        Raises:
            UnsupportedError: its answers are not ``cos``/``sin`` of position times its ``inv_freq``.
        """
        rows, layout, scale = [], "", 0.0
        for length in range(1, self.max_seq_len + 1):
            self.original(1, *args, **kwargs)
            answer = self._inner[0](torch.zeros(1, 1, 1), torch.tensor([[0, length - 1]]), *args, **kwargs)
            cos, sin, layout = compact(answer)
            inverse = getattr(self._inner[0], "inv_freq", None)
            scale = float((cos[0] ** 2 + sin[0] ** 2).mean().sqrt())
            if not isinstance(inverse, Tensor) or not torch.allclose(cos[1], (inverse * (length - 1)).cos() * scale, atol=1e-5):
                raise UnsupportedError("a rotary embedding's angles depend on the sequence length in an unknown way")
            rows.append(inverse.float().clone())
        self.original(1, *args, **kwargs)
        return torch.stack([rows[0], *rows]), layout, scale

    def _switch(self, cos: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Where answers change with the number of positions: ``None`` (nowhere), or the last length of the first table.

        Raises:
            DependsOnLength: the answers depend on the length in another way (dynamic scaling), so no table holds them.
        """

        def same(count: int, reference: Tensor) -> bool:
            return torch.equal(compact(self.original(count, *args, **kwargs))[0], reference[:count])

        probes = sorted({2, 3, *(n for p in range(2, 24) if (n := 2**p) < self.max_seq_len), self.max_seq_len - 1})
        differing = [n for n in probes if n <= self.max_seq_len and not same(n, cos)]
        if not differing:
            return None
        low, high = differing[-1], min((n for n in probes if n > differing[-1]), default=self.max_seq_len)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if same(middle, cos) else (middle, high)
        below = compact(self.original(low, *args, **kwargs))[0]
        if not all(same(n, below) for n in probes if n <= low) or not all(same(n, cos) for n in probes if n > low):
            raise DependsOnLength
        return low

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        capture = Capture.current
        if capture is None or position_ids.dim() != 2:  # several kinds of positions per token: the module's own code
            return self._inner[0](x, position_ids, *args, **kwargs)
        by_length = self.frequencies(args, kwargs)
        if by_length is not None:
            return self._computed(capture, x, position_ids, *by_length)
        cos_table, sin_table, layout, switch = self.table(args, kwargs)
        rows = position_ids
        if switch is not None:
            total = (capture.tokens.past_lens + capture.tokens.query_lens)[:, None]
            rows = position_ids + torch.where(total > switch, self.max_seq_len, 0)
        half_cos, half_sin = nn.functional.embedding(rows, cos_table), nn.functional.embedding(rows, sin_table)
        cos, sin = expand(half_cos, layout).to(x.dtype), expand(half_sin, layout).to(x.dtype)
        record = {"cos": cos_table, "sin": sin_table, "positions": rows, "layout": layout}
        if layout == "complex":
            return capture.tag(torch.complex(half_cos, half_sin), "angles", **record)
        capture.tag(cos, "angles", **record)
        return cos, sin

    @staticmethod
    def _computed(capture: Capture, x: Tensor, position_ids: Tensor, table: Tensor, layout: str, scale: float) -> Any:
        growing = capture.plan.layout == "growing"
        lengths = position_ids[:, -1] + 1 if growing else capture.tokens.past_lens + capture.tokens.query_lens  # [B]
        angles = position_ids[..., None].float() * nn.functional.embedding(lengths, table)[:, None]
        cos, sin = angles.cos() * scale, angles.sin() * scale
        if layout == "complex":
            return torch.complex(cos, sin)
        return expand(cos, layout).to(x.dtype), expand(sin, layout).to(x.dtype)


def compact(answer: Any) -> tuple[Tensor, Tensor, str]:
    """``(cos [P, R/2], sin, layout)`` of a rotary module's answer; layout says how the halves were repeated.

    Raises:
        ValueError: not a rotary module's answer.
    """
    if isinstance(answer, Tensor) and answer.is_complex() and answer.dim() == 3:
        return answer[0].real.contiguous(), answer[0].imag.contiguous(), "complex"
    if not (isinstance(answer, tuple) and len(answer) == 2 and all(isinstance(a, Tensor) and a.dim() == 3 for a in answer)):
        raise ValueError("it does not answer with cos and sin [B, S, R]")
    cos, sin = answer[0][0], answer[1][0]
    half = cos.shape[-1] // 2
    if torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:]):
        return cos[:, :half], sin[:, :half], "half"
    if torch.equal(cos[:, 0::2], cos[:, 1::2]) and torch.equal(sin[:, 0::2], sin[:, 1::2]):
        return cos[:, 0::2], sin[:, 0::2], "pairs"
    return cos, sin, "compact"


def expand(half: Tensor, layout: str) -> Tensor:
    """``[..., R/2]`` as the model's own module would have repeated it."""
    if layout == "half":
        return torch.cat((half, half), -1)
    return half.repeat_interleave(2, -1) if layout == "pairs" else half


def replace_rotary(model: nn.Module, max_seq_len: int, notes: list[str]) -> list[ExportRotary]:
    """Swaps rotary modules whose answers are a table lookup; returns ours."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    ours = []
    for parent, name, module in children(model):
        if isinstance(module, ExportRotary) or any(True for _ in module.parameters()):
            continue
        if list(inspect.signature(module.forward).parameters)[1:2] != ["position_ids"]:
            continue
        rotary = ExportRotary(module, max_seq_len, dtype)
        setattr(parent, name, rotary)
        ours.append(rotary)
    notes.append(f"{len(ours)} rotary modules as tables")
    return ours


def classify_rotary(function: Callable[..., Any]) -> tuple[str, bool] | None:
    """``(layout of its cos and sin, interleaved)`` of an apply_rotary function that equals ours on random tensors."""
    for layout, interleaved in (
        ("half", False),
        ("half", True),
        ("pairs", True),
        ("compact", False),
        ("compact", True),
        ("complex", True),
    ):
        with contextlib.suppress(Exception):  # any failure of a foreign function means: not this kind
            if all(_rotates(function, layout, interleaved, size, turned) for size, turned in ((16, 16), (16, 8))):
                return layout, interleaved
    return None


def _rotates(function: Callable[..., Any], layout: str, interleaved: bool, size: int, turned: int) -> bool:
    generator = torch.Generator().manual_seed(turned)
    q, k = torch.randn(2, 3, 4, size, generator=generator), torch.randn(2, 1, 4, size, generator=generator)
    angles = torch.randn(2, 4, turned // 2, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    try:
        if layout == "complex":  # such functions take [B, S, H, D]
            got_q, got_k = function(q.transpose(1, 2), k.transpose(1, 2), torch.complex(cos, sin))
            got_q, got_k = got_q.transpose(1, 2), got_k.transpose(1, 2)
        else:
            got_q, got_k = function(q, k, expand(cos, layout), expand(sin, layout))
    except Exception:
        if turned != size:  # it rotates all dimensions or none
            return True
        raise
    want_q, want_k = ops.rotate(q, cos, sin, interleaved), ops.rotate(k, cos, sin, interleaved)
    return got_q.shape == q.shape and torch.allclose(got_q, want_q, atol=1e-5) and torch.allclose(got_k, want_k, atol=1e-5)


def rotary_patches(model: nn.Module, notes: list[str]) -> list[tuple[Any, str, Callable[..., Any]]]:
    """``(module, name, replacement)`` for the ``apply_rotary*`` functions of the model's source files that pass the probe."""
    patches = []
    sources = {sys.modules[type(m).__module__] for m in model.modules() if type(m).__module__ in sys.modules}
    for source in sorted(sources, key=lambda s: s.__name__):
        for name, function in sorted(vars(source).items()):
            if not name.startswith("apply_rotary") or not callable(function):
                continue
            kind = classify_rotary(function)
            notes.append(f"{name}: {'own code' if kind is None else ' '.join(('pairs' if kind[1] else 'halves', kind[0]))}")
            if kind is not None:
                patches.append((source, name, _rotary_replacement(function, *kind)))
    return patches


def _rotary_replacement(original: Callable[..., Any], layout: str, interleaved: bool) -> Callable[..., Any]:
    def rotated(capture: Capture, x: Tensor, record: dict[str, Any]) -> Tensor:
        out = _OPS.rope(x, record["cos"], record["sin"], record["positions"], interleaved)
        tagged = {
            "raw": x,
            "cos": record["cos"],
            "positions": record["positions"],
            "sin": record["sin"],
            "interleaved": interleaved,
        }
        return capture.tag(out, "rotated", **tagged)

    def apply(q: Tensor, k: Tensor, cos: Tensor, *args: Any, **kwargs: Any) -> Any:
        capture = Capture.current
        record = capture.look(cos, "angles") if capture is not None else None
        extra = args[1:] if layout != "complex" else args
        odd = extra or any(
            v is not None and not (key == "unsqueeze_dim" and v == 1) for key, v in kwargs.items() if key != "sin"
        )
        if capture is None or record is None or record["layout"] != layout or odd:
            return original(q, k, cos, *args, **kwargs)
        if layout == "complex":
            return tuple(rotated(capture, x.transpose(1, 2), record).transpose(1, 2) for x in (q, k))
        return rotated(capture, q, record), rotated(capture, k, record)

    return apply
