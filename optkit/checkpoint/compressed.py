"""The compressed-tensors format, read: what store.py says a module's tensors are, and what other writers of the format add.

``weight_g_idx`` int32 ``[I]``: the group of each input, where groups follow the activation order. ``weight`` int8 with 16-bit
activations (``naive-quantized``, ``int-quantized``): codes one a byte, minus ``2**(num_bits-1)``; zero points are then int8
``[O, G]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from optkit import packing
from optkit.checkpoint.affine import QuantizedWeight
from optkit.checkpoint.packed import Packed, uniform_groups
from optkit.checkpoint.store import TensorStore
from optkit.errors import CheckpointError, UnsupportedError, UsageError
from optkit.scheme import QuantScheme, matches


class CompressedTensors(Packed):
    """Modules stored in the compressed-tensors format."""

    lead = ("weight_packed", "weight")
    leaves = (
        *("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point"),
        *("output_scale", "output_zero_point"),
    )

    def read(self, module: str) -> QuantizedWeight:
        return read_quantized(self.store, module, self.schemes[module])


def read_quantized(store: TensorStore, module: str, scheme: QuantScheme) -> QuantizedWeight:
    """The quantized matrix stored under ``module``, packed codes to codes.

    Raises:
        CheckpointError: its tensors are missing or do not fit the scheme.
        UnsupportedError: inputs reordered by ``weight_g_idx`` in a way no kernel takes.
    """
    try:
        codes, words = _codes(store, module, scheme)
        scale = store.get(f"{module}.weight_scale")
        scale = scale.reshape(codes.shape[0], -1) if scheme.granularity == "channel" else scale
        zero_point = None if scheme.symmetric else _zero_point(store.get(f"{module}.weight_zero_point"), codes, scheme, words)
        order = f"{module}.weight_g_idx"
        if order in store and bool((store.get(order) >= 0).all()):
            _, runs = uniform_groups(store.get(order), order)
            scale, zero_point = scale[:, runs], None if zero_point is None else zero_point[:, runs]
        inputs = None
        if scheme.activation_bits == 8 and f"{module}.input_scale" in store:
            inputs = store.get(f"{module}.input_scale").reshape(())
        return QuantizedWeight(codes, scale, zero_point, scheme, inputs)
    except UsageError as error:
        raise UnsupportedError(f"{module}: {error}") from error
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise CheckpointError(f"{module}: its stored tensors do not fit {scheme.describe()}: {error}") from error


def _codes(store: TensorStore, module: str, scheme: QuantScheme) -> tuple[Tensor, bool]:
    """uint8 ``[O, I]``, and whether they were packed into 32-bit words."""
    if f"{module}.weight_packed" not in store:
        return (store.get(f"{module}.weight").to(torch.int16) + scheme.zero_point).to(torch.uint8), False
    columns = int(store.get(f"{module}.weight_shape")[1])
    packed = store.get(f"{module}.weight_packed").numpy()
    return torch.from_numpy(packing.unpack_int32(packed, scheme.num_bits, columns)), True


def _zero_point(stored: Tensor, codes: Tensor, scheme: QuantScheme, words: bool) -> Tensor:
    """uint8 ``[O, G]``."""
    if words and stored.dtype == torch.int32:
        return torch.from_numpy(packing.unpack_int32(stored.numpy(), scheme.num_bits, codes.shape[0], axis=0))
    return (stored.to(torch.int16) + scheme.zero_point).to(torch.uint8).reshape(codes.shape[0], -1)


def quantized_modules(store: TensorStore) -> list[str]:
    """Names of the modules stored quantized."""
    return [name.removesuffix(".weight_scale") for name in store.names() if name.endswith(".weight_scale")]


def stored_schemes(config: Mapping[str, Any], store: TensorStore) -> dict[str, QuantScheme]:
    """Module name -> scheme of everything ``store`` holds quantized, as its ``quantization_config`` says.

    Raises:
        UnsupportedError: a kind of quantization that is not integer 4 or 8 bit; names the module.
    """
    groups = list(config.get("config_groups", {}).values())
    found = {}
    for module in quantized_modules(store):
        group = next(
            (g for g in groups if matches(module, [t for t in g["targets"] if t not in ("Linear", "Embedding")])), None
        )
        group = group or next((g for g in groups if "Linear" in g["targets"]), None)
        if group is None:
            raise CheckpointError(f"{module} is stored quantized, and no group of quantization_config covers it")
        found[module] = _scheme(module, group, store)
    return found


def _scheme(module: str, group: Mapping[str, Any], store: TensorStore) -> QuantScheme:
    weights, activations = group["weights"], group.get("input_activations")
    strategy = weights.get("strategy")
    what = f"{module}: {weights['num_bits']}-bit {weights.get('type')} weights by {strategy}"
    if activations is not None:
        what += (
            f" with {activations.get('num_bits')}-bit {activations.get('type')} activations by {activations.get('strategy')}"
        )
    remedy = "optkit reads 4 and 8-bit integer weights by group or channel, with 16-bit or symmetric 8-bit activations"
    fits = weights.get("type", "int") == "int" and weights["num_bits"] in (4, 8) and strategy in ("group", "channel")
    if activations is not None:
        fits = fits and activations.get("type", "int") == "int" and activations["num_bits"] == 8
        fits = fits and activations.get("symmetric", True) and activations.get("strategy") in ("token", "tensor", None)
    if not fits:
        raise UnsupportedError(f"{what} are not supported: {remedy}")
    size = weights["group_size"] if strategy == "group" else None
    order = f"{module}.weight_g_idx"
    if order in store and bool((index := store.get(order)).ge(0).all()):
        size, _ = uniform_groups(index, order)
    try:
        return QuantScheme(
            num_bits=weights["num_bits"],
            symmetric=weights.get("symmetric", True),
            group_size=size,
            activation_bits=16 if activations is None else 8,
            dynamic_activations=True if activations is None else bool(activations.get("dynamic")),
        )
    except UsageError as error:
        raise UnsupportedError(f"{what} are not supported: {error}") from error
