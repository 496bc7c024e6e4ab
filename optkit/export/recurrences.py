"""Recurrences and short convolutions of kernel libraries, found in a model's source and replaced by ops of state_ops.py.

A recurrent layer's torch code calls module-level functions with the argument names of its kernel library (mamba-ssm,
flash-linear-attention, causal-conv1d). Their torch fallbacks loop over chunks, which no graph of variable length can hold.
:func:`state_patches` finds such functions by their arguments, compares them with ours on random numbers, from zero and from
a given state, and replaces those that agree. A recurrence in a loop of the model's own is not recognised, and state_hooks.py
refuses its state: unrolled for one length, it would be wrong for others.

Padding: rows are right padded, so a padded token lies after a row's last valid one and cannot reach earlier outputs. Its decay
and key are zeroed, so that it leaves the state as it is.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optkit.export import state_ops  # noqa: F401  registers torch.ops.optkit
from optkit.export.provenance import Capture

Patch = tuple[Any, str, Callable[..., Any]]


def fresh_mask(capture: Capture) -> Tensor:
    """``[B, S]`` float32, ones at the new tokens that are not padding; made once per forward."""
    tokens, new = capture.tokens, capture.tokens.position_ids.shape[1]
    known = capture.shared.get("fresh_mask")
    if known is None:
        if capture.plan.layout == "growing":
            known = tokens.valid[:, tokens.valid.shape[1] - new :].float()
        else:
            known = (torch.arange(new)[None] < tokens.query_lens[:, None]).float()
        capture.shared["fresh_mask"] = known
    return known


def scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """``optkit::linear_attention`` in float32 with padded tokens switched off; see state_ops.py for the shapes."""
    capture = Capture.current
    q, k, v, decay = q.float(), k.float(), v.float(), decay.float()
    if capture is not None:
        mask = fresh_mask(capture)[..., None]  # [B, S, 1]
        k, decay = k * mask[..., None], decay * (mask if decay.dim() == 3 else mask[..., None])
    if state is None:
        state = q.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    out, final = torch.ops.optkit.linear_attention(q, k, v, decay, None if beta is None else beta.float(), state, scale)
    if capture is not None:
        capture.tag(final, "scanned")
    return out, final


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _positive(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(dt) if softplus else dt


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """flash-linear-attention's ``chunk_gated_delta_rule``: ``[B,S,Hk,D]``, values ``[B,S,H,Dv]``, ``g``/``beta [B,S,H]``.

    ``chunk_kda`` (Kimi delta attention, arXiv:2510.26692) has the same arguments with ``g [B,S,H,D]``.
    """
    q, k = (_unit(query), _unit(key)) if use_qk_l2norm_in_kernel else (query, key)
    out, final = scan(q, k, value, g, beta, initial_state, query.shape[-1] ** -0.5)
    return out.to(query.dtype), final if output_final_state else None


def state_space_2(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    """mamba-ssm's ``mamba_chunk_scan_combined``: ``x [B,S,H,P]``, ``dt [B,S,H]``, ``A``/``D [H]``, ``B``/``C [B,S,G,N]``."""
    x, dt = hidden_states.float(), _positive(dt, dt_bias, dt_softplus)
    if tuple(dt_limit) != (0.0, math.inf):
        dt = dt.clamp(dt_limit[0], dt_limit[1])
    out, final = scan(C, B, x * dt[..., None], dt * A.float(), None, initial_states, 1.0)
    out = out if D is None else out + x * D.float()[:, None]
    return (out, final) if return_final_states else out


def state_space_1(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Any:
    """mamba-ssm's ``selective_scan_fn``: ``u``/``dt``/``z [B,E,S]``, ``A [E,N]``, ``B``/``C [B,N,S]``, ``D [E]``.

    It takes no state, so the one that the cache handed out last is its start.
    """
    capture = Capture.current
    state = None if capture is None else capture.shared.get("open_state")
    u = hidden_states.float()
    dt = _positive(dt, None if delta_bias is None else delta_bias[:, None], delta_softplus)
    decay = dt.transpose(1, 2)[..., None] * A.float()  # [B, S, E, N]
    value = (dt * u).transpose(1, 2)[..., None]  # [B, S, E, 1]
    out, final = scan(C.transpose(1, 2)[:, :, None], B.transpose(1, 2)[:, :, None], value, decay, None, state, 1.0)
    y = out[..., 0].transpose(1, 2)
    y = y if D is None else y + u * D.float()[:, None]
    y = y if z is None else y * F.silu(z.float())
    return (y.to(hidden_states.dtype), final) if return_last_state else y.to(hidden_states.dtype)


def convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Tensor | None:
    """causal-conv1d's ``causal_conv1d_fn`` of the columns that a cache layer joined, only the new ones; else ``None``."""
    capture = Capture.current
    record = None if capture is None else capture.look(hidden_states, "convolved")
    if record is None or activation not in (None, "silu", "swish"):
        return None
    past = record["past"][..., record["past"].shape[-1] - (weight.shape[-1] - 1) :]
    return torch.ops.optkit.causal_conv(record["new"], past.to(record["new"].dtype), weight, bias, activation is not None)


@dataclass(frozen=True)
class Scan:
    """A recurrence of a kernel library: how it is recognised and what takes its place.

    Attributes:
        name: in the library.
        parameters: arguments a function must have to be looked at.
        replacement: ours.
        arguments: seeded random arguments for the comparison, for a generator.
        state: of the original, from ours.
    """

    name: str
    parameters: frozenset[str]
    replacement: Callable[..., Any]
    arguments: Callable[[torch.Generator], dict[str, Any]]
    state: Callable[[Tensor], Tensor]
    initial: str | None


def _delta_arguments(g: torch.Generator) -> dict[str, Any]:
    r = functools.partial(torch.randn, generator=g)
    return {
        "query": r(2, 5, 2, 8), "key": r(2, 5, 2, 8), "value": r(2, 5, 4, 6), "g": -r(2, 5, 4).abs(),
        "beta": r(2, 5, 4).sigmoid(), "output_final_state": True, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip


def _fine_delta_arguments(g: torch.Generator) -> dict[str, Any]:
    r = functools.partial(torch.randn, generator=g)
    return {
        "query": r(2, 5, 4, 8), "key": r(2, 5, 4, 8), "value": r(2, 5, 4, 6), "g": -r(2, 5, 4, 8).abs(),
        "beta": r(2, 5, 4).sigmoid(), "output_final_state": True, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip


def _space_2_arguments(g: torch.Generator) -> dict[str, Any]:
    r = functools.partial(torch.randn, generator=g)
    return {
        "hidden_states": r(2, 5, 4, 6), "dt": r(2, 5, 4), "A": -r(4).abs(), "B": r(2, 5, 2, 8), "C": r(2, 5, 2, 8),
        "chunk_size": 4, "D": r(4), "dt_bias": r(4), "dt_softplus": True, "dt_limit": (0.2, 1.5), "return_final_states": True,
    }  # fmt: skip


def _space_1_arguments(g: torch.Generator) -> dict[str, Any]:
    r = functools.partial(torch.randn, generator=g)
    return {
        "hidden_states": r(2, 6, 5), "dt": r(2, 6, 5), "A": -r(6, 4).abs(), "B": r(2, 4, 5), "C": r(2, 4, 5), "D": r(6),
        "z": r(2, 6, 5), "delta_bias": r(6), "delta_softplus": True, "return_last_state": True,
    }  # fmt: skip


SCANS = (
    Scan(
        "chunk_gated_delta_rule",
        frozenset(("query", "key", "value", "g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")),
        delta_rule,
        _delta_arguments,
        lambda state: state,
        "initial_state",
    ),
    Scan(
        "chunk_kda",
        frozenset(("query", "key", "value", "g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")),
        delta_rule,
        _fine_delta_arguments,
        lambda state: state,
        "initial_state",
    ),
    Scan(
        "mamba_chunk_scan_combined",
        frozenset(
            (
                "hidden_states",
                "dt",
                "A",
                "B",
                "C",
                "D",
                "dt_bias",
                "initial_states",
                "dt_softplus",
                "dt_limit",
                "return_final_states",
            )
        ),
        state_space_2,
        _space_2_arguments,
        lambda state: state.transpose(2, 3),
        "initial_states",
    ),
    Scan(
        "selective_scan_fn",
        frozenset(("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state")),
        state_space_1,
        _space_1_arguments,
        lambda state: state[..., 0],
        None,
    ),
)
_CONVOLUTION = frozenset(("hidden_states", "weight", "bias", "activation"))


def agrees(scan: Scan, function: Callable[..., Any]) -> bool:
    """Does ``function`` give our outputs and states on random numbers, from zero and from a given state?"""
    generator = torch.Generator().manual_seed(0)
    arguments = scan.arguments(generator)
    with contextlib.suppress(RuntimeError, TypeError, ValueError), torch.no_grad():  # what a function of another kind raises
        out, final = scan.replacement(**arguments)
        wanted = [(function(**arguments), (out, scan.state(final)))]
        if scan.initial is not None:
            start = torch.randn(final.shape, generator=generator)
            given = function(**arguments, **{scan.initial: scan.state(start).contiguous()})
            out, final = scan.replacement(**arguments, **{scan.initial: start})
            wanted.append((given, (out, scan.state(final))))
        return all(
            g.shape == w.shape and torch.allclose(g, w, atol=1e-4) for pair in wanted for g, w in zip(*pair, strict=True)
        )
    return False


def convolves(function: Callable[..., Any]) -> bool:
    """Is ``function`` a causal depthwise convolution with an optional SiLU?"""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=generator) for s in ((2, 6, 9), (6, 4), (6,)))
    past = x.new_zeros(2, 6, 3)
    with torch.no_grad():
        return all(
            torch.allclose(
                function(x, weight, b, activation=a), torch.ops.optkit.causal_conv(x, past, weight, b, a is not None), atol=1e-5
            )
            for b in (bias, None)
            for a in (None, "silu")
        )


def state_patches(model: nn.Module, notes: list[str]) -> list[Patch]:
    """``(module, name, replacement)`` for the recurrences and convolutions of the model's source files that pass the probe."""
    patches: list[Patch] = []
    for source in sorted({sys.modules[type(m).__module__] for m in model.modules()}, key=lambda s: s.__name__):
        for name, function in sorted(vars(source).items()):
            if inspect.isfunction(function) and (replacement := replacement_of(function)) is not None:
                notes.append(f"{name}: recognised")
                patches.append((source, name, replacement))
    return patches


def replacement_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    parameters = set(inspect.signature(function).parameters)
    for known in SCANS:
        if known.parameters <= parameters and agrees(known, function):
            return known.replacement
    if parameters >= _CONVOLUTION and "conv_state" not in parameters and convolves(function):

        def convolve(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            out = convolution(hidden_states, *args, **kwargs)
            own: Tensor = function(hidden_states, *args, **kwargs) if out is None else out
            return own

        return convolve
    return None
