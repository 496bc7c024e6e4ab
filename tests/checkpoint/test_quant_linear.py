"""Modules with packed weights compute what ordinary modules with the dequantized weights compute."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from torch import nn

from optkit.checkpoint import affine
from optkit.checkpoint.quant_linear import QuantEmbedding, QuantLinear, dequantize_packed, pack_weight, unpack_weight
from optkit.scheme import QuantScheme

SCHEMES = [
    QuantScheme(4, group_size=32),
    QuantScheme(4, symmetric=False, group_size=32),
    QuantScheme(4, group_size=None),
    QuantScheme(8, group_size=32),
    QuantScheme(8, symmetric=False, group_size=None),
]
ids = pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)


def quantized(scheme, rows=10, inputs=96, seed=0):
    weight = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)) + 0.3
    return affine.quantize(weight, *affine.range_scale(weight, scheme), scheme)


@ids
def test_packed_weights_dequantize_to_the_same_bits(scheme):
    """auto-round#1948, auto-round#1655: a packed format that was worse than the fake-quantized model."""
    whole = quantized(scheme)
    assert torch.equal(dequantize_packed(*pack_weight(whole), scheme.num_bits), affine.dequantize(whole))


@ids
def test_packing_comes_back_with_an_odd_number_of_groups_too(scheme):
    whole = quantized(scheme)
    back = unpack_weight(*pack_weight(whole), scheme)
    assert torch.equal(back.codes, whole.codes)
    assert torch.equal(back.scale, whole.scale)
    assert (back.zero_point is None) == (whole.zero_point is None)
    assert whole.zero_point is None or torch.equal(back.zero_point, whole.zero_point)


@ids
def test_a_linear_computes_with_the_dequantized_weights_and_bias(scheme):
    whole, bias, x = quantized(scheme), torch.arange(10.0), torch.randn(2, 3, 96)
    module = QuantLinear.from_quantized(whole, bias)
    assert torch.equal(module(x), nn.functional.linear(x, affine.dequantize(whole), bias))
    assert (module.in_features, module.out_features) == (96, 10)
    assert module.group_size == (scheme.group_size or 96)


@ids
def test_an_embedding_looks_up_dequantized_rows_times_its_factor(scheme):
    whole = quantized(scheme)
    ids = torch.tensor([[3, 0], [9, 3]])
    rows = affine.dequantize(whole)[ids]
    assert torch.equal(QuantEmbedding.from_quantized(whole)(ids), rows)
    assert torch.equal(QuantEmbedding.from_quantized(whole, factor=3.0)(ids), rows * 3.0)
    assert torch.equal(QuantEmbedding.from_quantized(whole, dtype=torch.float16)(ids), rows.half())


@pytest.mark.parametrize("dynamic", [True, False])
def test_eight_bit_activations_are_rounded_as_compressed_tensors_rounds_them(dynamic):
    scheme = QuantScheme(8, activation_bits=8, dynamic_activations=dynamic)
    whole = quantized(scheme)
    x = torch.randn(2, 5, 96) * 3
    linear = nn.Linear(96, 10, bias=False)
    linear.weight.data = affine.dequantize(whole)
    args = QuantizationArgs(num_bits=8, symmetric=True, dynamic=dynamic, strategy="token" if dynamic else "tensor")
    linear.quantization_scheme = QuantizationScheme(targets=["Linear"], input_activations=args)
    linear.quantization_status = QuantizationStatus.FROZEN
    linear.input_scale = torch.tensor([0.02])
    expected = nn.functional.linear(forward_quantize(linear, x, "input", args), linear.weight)
    module = QuantLinear(*pack_weight(whole), scheme, None, None if dynamic else torch.tensor(0.02))
    assert torch.equal(module(x), expected)
    assert not torch.equal(module(x), nn.functional.linear(x, linear.weight))
