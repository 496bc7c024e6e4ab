"""Round to nearest: bounds per group, groups that break quantizers, and the search that is never worse than the plain range."""

import math

import numpy as np
import onnxruntime as ort
import pytest
import torch

from optkit.checkpoint import affine
from optkit.errors import UsageError
from optkit.quantize import rtn
from optkit.quantize.rtn import quantize_linear
from optkit.scheme import QuantScheme

W4 = QuantScheme(4, group_size=32)
W4_ASYM = QuantScheme(4, symmetric=False, group_size=32)
SCHEMES = [
    W4,
    W4_ASYM,
    QuantScheme(4, group_size=64),
    QuantScheme(4, symmetric=False, group_size=128),
    QuantScheme(8, group_size=32),
    QuantScheme(8, symmetric=False, group_size=None),
    QuantScheme(8, group_size=None, activation_bits=8),
]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heavy_tailed(*shape, seed=0):
    x = gaussian(*shape, seed=seed)
    return x * x.abs()


def group_errors(weight, quantized, importance=None):
    """Weighted squared error of each group, float64 ``[O, G]``."""
    error = (affine.dequantize(quantized).double() - weight.double()).square()
    if importance is not None:
        error = error * importance.double()
    return error.unflatten(-1, (quantized.scale.shape[1], -1)).sum(-1)


def default_importance(weight, scheme):
    """What the search minimises when nothing is known of the inputs."""
    return torch.ones_like(weight) if scheme.symmetric else weight.square()


HARD = {
    "an all-zero group among others": torch.cat([torch.zeros(4, 128), gaussian(4, 128)], 1),
    "nothing but zeros": torch.zeros(4, 256),
    "a constant": torch.full((4, 256), -0.21),
    "one huge outlier": torch.where(torch.arange(256) == 17, 1e4, 0.01 * gaussian(4, 256)),
    "all positive": gaussian(4, 256).abs() + 0.5,
    "all negative": -gaussian(4, 256).abs() - 0.5,
    "denormals": 1e-41 * gaussian(4, 256),
    "float16 denormals": 1e-6 * gaussian(4, 256),
}


@pytest.mark.parametrize("name", HARD)
@every_scheme
def test_hard_groups_stay_finite_and_no_worse_than_their_plain_range(scheme, name):
    """AutoAWQ#498, AutoAWQ#577, lmdeploy#1786: NaN scales from all-zero groups."""
    weight = HARD[name]
    searched, plain = (quantize_linear(weight, scheme, search=search) for search in ("mse", "minmax"))
    back = affine.dequantize(searched)
    assert back.isfinite().all()
    assert (searched.scale != 0).all()
    assert searched.scale.isfinite().all()
    importance = default_importance(weight, scheme)
    assert (group_errors(weight, searched, importance) <= group_errors(weight, plain, importance) * (1 + 1e-5) + 1e-30).all()
    assert torch.equal(back[weight == 0], weight[weight == 0])


@every_scheme
def test_the_search_is_no_worse_than_the_plain_range_in_any_group(scheme):
    for weight in (gaussian(48, 256), heavy_tailed(48, 256)):
        for importance in (None, torch.rand(256, generator=torch.Generator().manual_seed(5)) + 0.01):
            searched = quantize_linear(weight, scheme, importance)
            plain = quantize_linear(weight, scheme, search="minmax")
            weights = default_importance(weight, scheme) if importance is None else importance.expand_as(weight)
            least, first = group_errors(weight, searched, weights), group_errors(weight, plain, weights)
            assert (least <= first * (1 + 1e-5)).all()
            assert least.sum() < first.sum()


def test_without_statistics_a_symmetric_search_clips_no_weight():
    weight = heavy_tailed(32, 256)
    quantized = quantize_linear(weight, W4)
    reach = quantized.scale.abs() * 8 * (1 + 2**-7)
    assert (weight.unflatten(-1, (8, 32)).abs().amax(-1) <= reach).all()


def test_inputs_that_count_more_get_less_error():
    weight, importance = heavy_tailed(64, 256), torch.ones(256)
    importance[::4] = 100.0
    error = (affine.dequantize(quantize_linear(weight, W4, importance)) - weight).square()
    even = (affine.dequantize(quantize_linear(weight, W4, torch.ones(256))) - weight).square()
    assert error[:, ::4].sum() < 0.9 * even[:, ::4].sum()
    assert error.sum() > even.sum()


def test_inputs_that_never_occur_give_no_nan():
    weight = gaussian(8, 64)
    for dead in (slice(3, 4), slice(0, 32), slice(None)):
        importance = torch.ones(64)
        importance[dead] = 0.0
        assert affine.dequantize(quantize_linear(weight, W4, importance)).isfinite().all()


@pytest.mark.parametrize("seed", range(5))
def test_four_bit_error_is_at_most_that_of_a_scale_of_two_max_over_fifteen(seed):
    """onnxruntime-genai's quantization note: 2 * max / 15 loses 2.2 MMLU points against a signed max / 8."""
    weight = gaussian(64, 128, seed=seed)
    groups = weight.unflatten(-1, (4, 32))
    scale = 2 * groups.abs().amax(-1, keepdim=True) / 15
    theirs = ((groups / scale).round().clamp(-8, 7) * scale).flatten(-2)
    for search in rtn.SEARCHES:
        ours = affine.dequantize(quantize_linear(weight, W4, search=search))
        assert (ours - weight).square().sum() <= (theirs - weight).square().sum()


@pytest.mark.parametrize("seed", range(5))
def test_four_bit_error_with_all_inputs_alike_is_at_most_that_of_onnxruntime_s_quantizer(seed):
    """Its kernel (MatMulNBits' default quantizer) has float32 scales, which ours are rounded from, and no search."""
    weight = gaussian(64, 128, seed=seed)
    columns = np.ascontiguousarray(weight.T.numpy())  # their layout is [I, O]
    packed, scales = np.zeros((64, 4, 16), np.uint8), np.zeros(64 * 4, np.float32)
    zero_points = np.zeros(64 * 2, np.uint8)
    ort.capi._pybind_state.quantize_matmul_4bits(packed, columns, scales, zero_points, 32, 64, 128, True)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(64, 4, 32).astype(np.float32)
    theirs = torch.from_numpy((codes - 8) * scales.reshape(64, 4, 1)).reshape(64, 128)
    ours = affine.dequantize(quantize_linear(weight, W4, torch.ones(128)))
    plain = affine.dequantize(quantize_linear(weight, W4, search="minmax"))
    error, first, rounded = ((x - weight).square().sum() for x in (ours, theirs, plain))
    assert error < 0.95 * first
    assert rounded < 1.005 * first  # what storing scales in 8 significant bits costs


@pytest.mark.parametrize("inputs", [32, 96, 160])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_asymmetric_block_on_one_side_of_zero_comes_back_with_any_number_of_groups(sign, inputs):
    """onnxruntime#19450: garbage where the zero point is not the mid-range one."""
    weight = sign * (gaussian(6, inputs).abs() + 0.3)
    quantized = quantize_linear(weight, W4_ASYM)
    assert (quantized.zero_point != 8).any()
    assert ((affine.dequantize(quantized) - weight).abs() < 1.5 * quantized.scale.abs().max()).all()


@pytest.mark.parametrize("search", rtn.SEARCHES)
def test_one_group_as_wide_as_the_row_is_the_same_as_one_scale_per_channel(search):
    weight = heavy_tailed(10, 64)
    group = quantize_linear(weight, QuantScheme(8, group_size=64), search=search)
    channel = quantize_linear(weight, QuantScheme(8, group_size=None), search=search)
    assert torch.equal(group.codes, channel.codes)
    assert torch.equal(group.scale, channel.scale)


def test_a_group_size_that_does_not_divide_names_the_layer_and_what_does():
    """compressed-tensors#447, AutoAWQ#602, GPTQModel#328, sglang#3571."""
    with pytest.raises(
        UsageError, match=r"group_size 64 does not divide the 96 inputs .*\(model\.layers\.0\.up\): use 16 or 32"
    ):
        quantize_linear(torch.zeros(4, 96), QuantScheme(4, group_size=64), name="model.layers.0.up")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused_by_layer(value):
    weight = gaussian(4, 64)
    weight[2, 5] = value
    with pytest.raises(UsageError, match="up_proj: has weights that are NaN or infinite"):
        quantize_linear(weight, W4, name="up_proj")


def test_what_is_not_a_matrix_and_an_unknown_search_are_refused():
    """llm-compressor#2939: experts fused into three dimensions were quantized along the wrong axis."""
    with pytest.raises(UsageError, match=r"experts: a matrix is quantized, and this has the shape \[2, 4, 64\]"):
        quantize_linear(torch.zeros(2, 4, 64), W4, name="experts")
    with pytest.raises(UsageError, match="'best' is not known"):
        quantize_linear(torch.zeros(4, 64), W4, search="best")


@every_scheme
def test_rows_do_not_depend_on_each_other_or_on_how_the_work_is_cut(scheme, monkeypatch):
    weight = heavy_tailed(37, 256)
    whole = quantize_linear(weight, scheme)
    monkeypatch.setattr(rtn, "CHUNK", 256 * 5)
    cut = quantize_linear(weight, scheme)
    alone = quantize_linear(weight[7:8], scheme)
    for ours, expected in ((cut, whole), (alone, None)):
        rows = slice(7, 8) if expected is None else slice(None)
        assert torch.equal(ours.codes, whole.codes[rows])
        assert torch.equal(ours.scale, whole.scale[rows])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_quantized_by_their_float32_values(dtype):
    weight = heavy_tailed(8, 64).to(dtype)
    half, full = quantize_linear(weight, W4), quantize_linear(weight.float(), W4)
    assert torch.equal(half.codes, full.codes)
    assert torch.equal(half.scale, full.scale)


def test_weights_on_a_symmetric_grid_come_back_exactly():
    scale = 2.0 ** torch.randint(-6, 0, (5, 3), generator=torch.Generator().manual_seed(0)).float()
    codes = torch.randint(0, 16, (5, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    codes[:, ::32] = 0
    weight = affine.dequantize(affine.QuantizedWeight(codes, scale, None, W4))
    assert torch.equal(affine.dequantize(quantize_linear(weight, W4)), weight)
