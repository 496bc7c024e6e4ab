"""Replaces modules of a model by ours, each only after behaving the same on random numbers.

* RMSNorm: a module with one 1-D weight and an epsilon whose output equals ``x/rms(x)·w`` or ``·(1+w)``;
* linears and embeddings: by type, ``nn.Linear`` and the quantized modules of checkpoint/quant_linear.py;
* experts behind transformers' experts interface whose gate behaves like ``gate·σ(alpha·gate)·(up + beta)``.

Whatever does not pass its probe stays the model's own code: slower, and as correct.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from optkit.checkpoint.quant_linear import QuantEmbedding, QuantLinear
from optkit.export import ops
from optkit.export.provenance import Capture
from optkit.export.weights import Weights

_OPS = torch.ops.optkit


class ExportRMSNorm(nn.Module):
    """``x [..., E] -> x / sqrt(mean(x²) + eps) · weight``, computed in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps, self.width = nn.Parameter(weight, requires_grad=False), eps, weight.numel()

    def forward(self, x: Tensor) -> Tensor:
        if Capture.current is not None:
            Capture.current.norms.append((self, x.dim() == 4))
        return _OPS.rms_norm(x, self.weight, self.eps)


class ExportLinear(nn.Module):
    """``nn.Linear`` as one op; shares the parameters."""

    def __init__(self, weight: Any, bias: Any) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        return _OPS.linear(x, self.weight, self.bias)


class ExportQuantLinear(nn.Module):
    """:class:`QuantLinear` as one op; shares the buffers.

    The shift of a shifted scheme is the same for all inputs of a group, so it multiplies their sum: a second product, of
    ``[.., G]`` sums and ``[G, O]`` shifts. Kernels have no place for it, and the integer zero points stay small ones.
    """

    weight_shift: Tensor | None

    def __init__(self, inner: QuantLinear) -> None:
        super().__init__()
        self.num_bits, self.out_features, self.in_features = inner.scheme.num_bits, inner.out_features, inner.in_features
        for name in ("weight_packed", "weight_scale", "weight_zero_point", "weight_shift", "bias"):
            self.register_buffer(name, getattr(inner, name))

    def forward(self, x: Tensor) -> Tensor:
        y = _OPS.quant_linear(x, self.weight_packed, self.weight_scale, self.weight_zero_point, self.bias, self.num_bits)
        if self.weight_shift is None:
            return y
        sums = x.unflatten(-1, (self.weight_shift.shape[1], -1)).sum(-1)
        return y + sums @ self.weight_shift.t()


class ExportInt8Linear(nn.Module):
    """:class:`QuantLinear` with 8-bit activations as one op; shares the buffers."""

    def __init__(self, inner: QuantLinear) -> None:
        super().__init__()
        self.out_features, self.in_features = inner.out_features, inner.in_features
        for name in ("weight_packed", "weight_scale", "bias", "input_scale"):
            self.register_buffer(name, getattr(inner, name))

    def forward(self, x: Tensor) -> Tensor:
        rounds = Capture.current is not None and Capture.current.plan.rounding
        return _OPS.int8_linear(x, self.weight_packed, self.weight_scale, self.bias, self.input_scale, rounds)


class ExportQuantEmbedding(nn.Module):
    """:class:`QuantEmbedding` as one op, its constant factor and dtype after it; shares the buffers."""

    weight_shift: Tensor | None

    def __init__(self, inner: QuantEmbedding) -> None:
        super().__init__()
        self.num_bits, self.factor, self.dtype = inner.scheme.num_bits, inner.factor, inner.dtype
        for name in ("weight_packed", "weight_scale", "weight_zero_point", "weight_shift"):
            self.register_buffer(name, getattr(inner, name))

    def forward(self, ids: Tensor) -> Tensor:
        rows = _OPS.quant_embedding(ids, self.weight_packed, self.weight_scale, self.weight_zero_point, self.num_bits)
        if self.weight_shift is not None:
            shift = nn.functional.embedding(ids, self.weight_shift)
            rows = (rows.unflatten(-1, (shift.shape[-1], -1)) + shift.unsqueeze(-1)).flatten(-2)
        rows = rows.to(self.dtype)
        return rows if self.factor == 1.0 else rows * self.factor


class WantedPositions(nn.Module):
    """Before the output projection: only the positions asked for reach it."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        capture = Capture.current
        if capture is not None and capture.logits_positions is not None:
            hidden = _OPS.take_positions(hidden, capture.logits_positions, capture.tokens.query_lens)
        return self.head(hidden)

    @property
    def weight(self) -> Tensor:
        """Some models ask their head for its dtype."""
        return self.head.weight  # type: ignore[return-value]


def children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """``(parent, name, child)`` of every submodule, safe against replacement while iterating."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            yield parent, name, child


def replace_norms(model: nn.Module, weights: Weights) -> int:
    """Swaps RMS norms; returns how many."""
    count = 0
    for parent, name, module in children(model):
        found = _rms_norm(module, weights)
        if found is not None:
            setattr(parent, name, found)
            count += 1
    return count


def _rms_norm(module: nn.Module, weights: Weights) -> ExportRMSNorm | None:
    parameters = list(module.named_parameters(recurse=False))
    if len(parameters) != 1 or parameters[0][1].dim() != 1 or list(module.children()):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # a gated norm takes its gate as well
        return None
    eps = next(
        (getattr(module, a) for a in ("variance_epsilon", "eps", "epsilon") if isinstance(getattr(module, a, None), float)),
        None,
    )
    if eps is None:
        return None
    name, weight = parameters[0]
    generator = torch.Generator().manual_seed(0)
    trial = torch.randn(weight.shape, generator=generator).to(weight.dtype)
    x = torch.randn(2, 3, weight.numel(), generator=generator).to(weight.dtype)
    try:
        got = torch.func.functional_call(module, {name: trial}, (x,))
    except (TypeError, RuntimeError):
        return None
    if not isinstance(got, Tensor) or got.shape != x.shape:
        return None
    tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
    for effective, offset in ((trial, 0), (1 + trial, 1)):
        if torch.allclose(got.float(), ops.rms_norm(x, effective, eps).float(), atol=tolerance, rtol=10 * tolerance):
            return ExportRMSNorm(weights.value(weight) + offset, eps)
    return None


def replace_linears(model: nn.Module) -> int:
    """Every linear and quantized module becomes one op; returns how many linears."""
    count = 0
    for parent, name, module in children(model):
        if isinstance(module, QuantLinear):
            eight = module.scheme.activation_bits == 8
            setattr(parent, name, ExportInt8Linear(module) if eight else ExportQuantLinear(module))
        elif isinstance(module, QuantEmbedding) and type(module).forward is QuantEmbedding.forward:
            setattr(parent, name, ExportQuantEmbedding(module))
            continue
        elif isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            setattr(parent, name, ExportLinear(module.weight, module.bias))
        else:
            continue
        count += 1
    return count


def wrap_head(model: nn.Module) -> None:
    """Puts :class:`WantedPositions` before the output projection."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    for parent, name, module in children(model):
        if module is head:
            setattr(parent, name, WantedPositions(module))
            return


@contextlib.contextmanager
def patched(patches: list[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Installs the replacements for the block."""
    with contextlib.ExitStack() as stack:
        for source, name, replacement in patches:
            stack.callback(setattr, source, name, getattr(source, name))
            setattr(source, name, replacement)
        yield


# Experts


class ExportExperts(nn.Module):
    """Weights of one experts module in the layout of ``optkit::moe``."""

    def __init__(self, tensors: dict[str, Tensor | None], activation: tuple[float, float, float]) -> None:
        super().__init__()
        self.activation = activation
        for name in ("fc1", "fc1_scale", "fc1_bias", "fc2", "fc2_scale", "fc2_bias"):
            tensor = tensors.get(name)
            if isinstance(tensor, nn.Parameter):  # the module's own, under a second name: registered as what it is
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor, persistent=False)

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return _OPS.moe(
            x,
            index,
            weight,
            self.fc1,
            self.fc1_scale,
            self.fc1_bias,
            self.fc2,
            self.fc2_scale,
            self.fc2_bias,
            *self.activation,
            0,
        )


def prepare_experts(model: nn.Module, weights: Weights) -> int:
    """Gives every experts module whose gate passes the probe its weights in our layout; returns how many."""
    count = 0
    for module in list(model.modules()):
        if not all(hasattr(module, a) for a in ("has_gate", "is_transposed", "gate_up_proj", "down_proj", "_apply_gate")):
            continue
        if not module.has_gate or getattr(module, "has_post_expert_norm", False):
            continue
        prepared = _experts(module, weights)
        if prepared is not None:
            module.optkit_experts = prepared
            count += 1
    return count


def _experts(module: Any, weights: Weights) -> ExportExperts | None:
    turned = bool(module.is_transposed)
    width = module.gate_up_proj.shape[2 if turned else 1]
    activation = _gate(module, width)
    if activation is None:
        return None
    concatenated, *constants = activation
    order = torch.arange(width)
    if concatenated:  # the op takes gate and up rows interleaved
        order = order.unflatten(0, (2, width // 2)).t().reshape(-1)

    def rows(w: Tensor) -> Tensor:
        return (w.transpose(1, 2) if turned else w)[:, order]

    def columns(w: Tensor) -> Tensor:
        return w.transpose(1, 2).contiguous() if turned else w

    tensors: dict[str, Tensor | None] = {
        "fc1": weights.derive(module.gate_up_proj, rows, "fc1"),
        "fc2": weights.derive(module.down_proj, columns, "fc2") if turned else module.down_proj,
    }
    if getattr(module, "has_bias", False):
        tensors["fc1_bias"] = weights.derive(module.gate_up_proj_bias, lambda b: b[:, order], "fc1_bias")
        tensors["fc2_bias"] = module.down_proj_bias
    return ExportExperts(tensors, (constants[0], constants[1], constants[2]))


def _gate(module: Any, width: int) -> tuple[bool, float, float, float] | None:
    """``(gate and up concatenated?, alpha, beta, limit)`` of an activation that equals ours on random numbers."""
    y = torch.randn(5, width, generator=torch.Generator().manual_seed(0)).to(module.down_proj.dtype) * 4
    with torch.no_grad():
        want = module._apply_gate(y)
    limit = float(getattr(module, "limit", 0.0) or 0.0)
    kinds = (
        (1.0, 0.0, 0.0),
        (float(getattr(module, "alpha", 1.702)), 1.0, limit),
        (float(getattr(module, "alpha", 1.702)), 1.0, 7.0),
    )
    for concatenated in (True, False):
        gate, up = (y[:, : width // 2], y[:, width // 2 :]) if concatenated else (y[:, 0::2], y[:, 1::2])
        for alpha, beta, bound in kinds:
            g, u = (gate.clamp(max=bound), up.clamp(-bound, bound)) if bound else (gate, up)
            if torch.allclose(g * torch.sigmoid(alpha * g) * (u + beta), want, atol=1e-4):
                return concatenated, alpha, beta, bound
    return None
