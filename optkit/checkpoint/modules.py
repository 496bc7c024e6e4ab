"""Small tools on torch modules: modules without memory, replacing one by name, what an embedding multiplies its rows by."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from optkit.checkpoint.quant_linear import QuantEmbedding, QuantLinear
from optkit.errors import UnsupportedError
from optkit.scheme import QuantScheme

PACKED = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shift", "input_scale")


@contextlib.contextmanager
def meta_parameters() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device; their buffers are real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.data.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Puts ``new`` where the submodule ``name`` is."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new)


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Makes ``tensor`` the parameter or buffer ``name``; returns the object that was set, for ties."""
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if leaf in module._parameters:
        parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
        module._parameters[leaf] = parameter
        return parameter
    module._buffers[leaf] = tensor
    return tensor


def row_factor(embedding: nn.Module) -> float:
    """What an embedding module multiplies its rows by, found by looking up ones.

    Raises:
        UnsupportedError: its output is not a constant times the row, so it cannot be stored quantized.
    """
    if type(embedding).forward is nn.Embedding.forward:
        return 1.0
    weight: Any = embedding.weight
    probe = copy.copy(embedding)
    probe._parameters = {
        **embedding._parameters,
        "weight": nn.Parameter(_ramp(weight.dtype, weight.shape[1]), requires_grad=False),
    }
    rows = probe(torch.arange(3)).float()
    factor = float(rows[1, 0])
    if not torch.equal(rows, torch.tensor([0.0, factor, 2 * factor]).unsqueeze(1).expand(3, weight.shape[1])):
        raise UnsupportedError(f"{type(embedding).__name__} does more than looking up rows; use embedding: keep")
    return factor


def _ramp(dtype: torch.dtype, width: int) -> Tensor:
    return torch.arange(3, dtype=dtype).unsqueeze(1).repeat(1, width)


def computes_linear(module: nn.Linear) -> bool:
    """Does a subclass of ``nn.Linear`` with a ``forward`` of its own still compute ``x @ W.T + b``? Tried on small random
    weights."""
    generator = torch.Generator().manual_seed(0)
    probe = copy.copy(module)
    weight, x = (torch.randn(n, 7, generator=generator, dtype=torch.float64) for n in (5, 2))
    bias = None if module.bias is None else torch.randn(5, generator=generator, dtype=torch.float64)
    own = {"weight": weight, "bias": bias}
    probe._parameters = {
        k: v if k not in own or own[k] is None else nn.Parameter(own[k]) for k, v in module._parameters.items()
    }
    try:
        return torch.allclose(probe(x), nn.functional.linear(x, weight, bias), rtol=1e-9, atol=1e-9)
    except (RuntimeError, TypeError, AttributeError):
        return False


def meta_quantized(module: nn.Module, scheme: QuantScheme, dtype: torch.dtype, outputs: int, inputs: int) -> nn.Module:
    """The quantized twin of a linear or embedding with ``[outputs, inputs]`` weights, on the meta device.

    Scales are shown as ``dtype``.
    """
    groups = scheme.groups(inputs)
    packed = torch.empty(outputs, groups, inputs // groups * scheme.num_bits // 8, dtype=torch.uint8, device="meta")
    scale = torch.empty(outputs, groups, dtype=dtype, device="meta")
    zero_point = None
    if not scheme.symmetric:
        zero_point = torch.empty(outputs, -(-groups * scheme.num_bits // 8), dtype=torch.uint8, device="meta")
    shift = torch.empty_like(scale) if scheme.shifted else None
    if isinstance(module, nn.Embedding):
        return QuantEmbedding(packed, scale, zero_point, scheme, factor=row_factor(module), dtype=dtype, shift=shift)
    bias: Any = getattr(module, "bias", None)
    inputs_scale = None if scheme.dynamic_activations else torch.empty((), dtype=dtype, device="meta")
    return QuantLinear(packed, scale, zero_point, scheme, None if bias is None else bias.data, inputs_scale, shift)


def share_weights(embedding: nn.Module, head: nn.Module) -> None:
    """Makes ``head`` hold the very buffers of ``embedding``."""
    for name in PACKED[:4]:
        head._buffers[name] = embedding._buffers[name]


def unpacked(module: QuantLinear | QuantEmbedding, dtype: torch.dtype) -> nn.Module:
    """The floating-point module with the dequantized weights."""
    weight = nn.Parameter(module.dequantized().to(dtype), requires_grad=False)
    if isinstance(module, QuantEmbedding):
        return _Embedding(weight, module.factor)
    linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
    linear.weight = weight
    if module.bias is not None:
        linear.bias = nn.Parameter(module.bias, requires_grad=False)
    return linear


class _Embedding(nn.Embedding):
    """An embedding that multiplies its rows by a constant."""

    def __init__(self, weight: nn.Parameter, factor: float) -> None:
        super().__init__(weight.shape[0], weight.shape[1], _weight=weight, _freeze=True)
        self.factor = factor

    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids)
        return rows if self.factor == 1.0 else rows * self.factor
