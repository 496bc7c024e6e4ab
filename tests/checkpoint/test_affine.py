"""The scale / zero-point formula: proven bounds, references written from the formula, and groups that break formulas."""

import numpy as np
import pytest
import torch

from optkit.checkpoint import affine
from optkit.scheme import QuantScheme
from tests import reference

W4 = QuantScheme(4, group_size=32)
W4_ASYM = QuantScheme(4, symmetric=False, group_size=32)
W8 = QuantScheme(8, group_size=32)
SCHEMES = [W4, W4_ASYM, W8, QuantScheme(8, symmetric=False, group_size=32), QuantScheme(8, group_size=None)]
HARD = {
    "zeros": torch.zeros(2, 64),
    "constant": torch.full((2, 64), 0.37),
    "one huge outlier": torch.cat([torch.full((2, 1), 3e4), 0.01 * torch.ones(2, 63)], 1),
    "all positive": torch.rand(2, 64, generator=torch.Generator().manual_seed(1)) + 0.5,
    "all negative": -torch.rand(2, 64, generator=torch.Generator().manual_seed(2)) - 0.5,
    "denormal": torch.full((2, 64), 1e-41),
    "below float16": 1e-12 * torch.randn(2, 64, generator=torch.Generator().manual_seed(3)),
}


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)
def test_rounding_is_within_half_a_step_of_what_the_grid_covers(scheme):
    weight = gaussian(16, 64)
    scale, zero_point = affine.range_scale(weight, scheme)
    offset = float(scheme.zero_point) if zero_point is None else zero_point.float().unsqueeze(-1)
    ends = [(end - offset) * scale.unsqueeze(-1) for end in (0, scheme.code_max)]
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    inside = torch.maximum(torch.minimum(affine.grouped(weight, scheme), high), low).flatten(-2)
    error = (affine.fake_quantize(weight, scale, zero_point, scheme) - inside).abs()
    step = affine.grouped(torch.ones_like(weight), scheme).mul(scale.abs().unsqueeze(-1)).flatten(-2)
    assert (error <= 0.5 * step * (1 + 1e-5)).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)
def test_codes_and_values_are_those_of_the_formula_in_double_precision(scheme):
    weight = gaussian(8, 96 if scheme.group_size else 64)
    scale, zero_point = affine.range_scale(weight, scheme)
    quantized = affine.quantize(weight, scale, zero_point, scheme)
    size = weight.shape[1] // scale.shape[1]
    wide = np.repeat(scale.numpy(), size, 1)
    offset = np.full(wide.shape, scheme.zero_point) if zero_point is None else np.repeat(zero_point.numpy(), size, 1)
    codes = reference.quantize(weight, wide, offset, 0, scheme.code_max)
    away_from_ties = np.abs(np.abs(weight.numpy() / wide % 1) - 0.5) > 1e-5
    assert np.array_equal(quantized.codes.numpy()[away_from_ties], codes[away_from_ties])
    exact = reference.dequantize(quantized.codes.numpy(), wide, offset)
    assert np.array_equal(affine.dequantize(quantized).double().numpy(), exact.astype(np.float32).astype(np.float64))


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)
def test_hard_groups_give_finite_weights_no_farther_off_than_a_step(scheme, name):
    """AutoAWQ#498, AutoAWQ#577, lmdeploy#1786: NaN scales where a group is all zero."""
    weight = HARD[name]
    scale, zero_point = affine.range_scale(weight, scheme)
    back = affine.fake_quantize(weight, scale, zero_point, scheme)
    assert back.isfinite().all()
    assert (scale != 0).all()
    spread = affine.grouped(weight, scheme).abs().amax(-1) / (scheme.zero_point - 1)
    step = affine.grouped(torch.ones_like(weight), scheme).mul(spread.unsqueeze(-1)).flatten(-2)
    smallest = scheme.code_max * 2**-25  # half the distance of the smallest float16 scales, for each code
    assert ((back - weight).abs() <= step * 1.01 + smallest).all()


def test_zeros_come_back_as_exact_zeros():
    weight = torch.zeros(3, 64)
    for scheme in SCHEMES:
        back = affine.fake_quantize(weight, *affine.range_scale(weight, scheme), scheme)
        assert torch.equal(back, weight)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_magnitude_is_on_code_zero_and_the_whole_grid_is_used(sign):
    weight = sign * torch.linspace(-0.7, 0.8, 32).unsqueeze(0)
    scale, _ = affine.range_scale(weight, W4)
    quantized = affine.quantize(weight, scale, None, W4)
    assert scale.item() * sign < 0
    assert quantized.codes[0, 31] == 0
    assert set(quantized.codes[0].tolist()) == set(range(16))
    assert affine.dequantize(quantized)[0, 31].item() == pytest.approx(0.8 * sign, rel=2**-8)


def test_a_signed_scale_has_less_error_than_one_that_leaves_a_code_unused():
    """onnxruntime-genai's quantization note: 2 * max / 15 costs 2.2 MMLU points against max / 8 with a sign."""
    weight = gaussian(256, 32)
    ours = affine.fake_quantize(weight, *affine.range_scale(weight, W4), W4)
    amax = weight.abs().amax(-1, keepdim=True)
    unused = (weight / (amax / 7)).round() * (amax / 7)
    assert (ours - weight).square().sum() < (unused - weight).square().sum()


@pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)
def test_a_scale_is_the_same_number_in_every_float_type(scheme):
    for weight in (gaussian(32, 64), 1e-4 * gaussian(32, 64), 1e-6 * gaussian(32, 64), 100 * gaussian(32, 64)):
        scale, _ = affine.range_scale(weight, scheme)
        assert torch.equal(scale.half().float(), scale)
        assert torch.equal(scale.bfloat16().float(), scale)


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-5, 1e-6, 30.0])
def test_symmetric_four_bit_weights_are_the_same_numbers_in_float16(size):
    weight = size * gaussian(64, 64)
    back = affine.fake_quantize(weight, *affine.range_scale(weight, W4), W4)
    assert torch.equal(back.half().float(), back)


def test_a_scale_that_underflows_or_overflows_becomes_one():
    scale = torch.tensor([0.0, 1e-9, 1e6, float("nan"), float("inf"), -0.25])
    assert affine.safe_scale(scale).tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, -0.25]


def test_an_all_positive_block_keeps_zero_and_has_a_zero_point_at_the_end():
    """onnxruntime#19450: garbage from asymmetric weights whose zero point is not the mid-range one."""
    weight = gaussian(4, 96).abs() + 0.1
    scale, zero_point = affine.range_scale(weight, W4_ASYM)
    assert (zero_point == 0).all()
    scale, zero_point = affine.range_scale(-weight, W4_ASYM)
    assert (zero_point == 15).all()
    assert (affine.fake_quantize(-weight, scale, zero_point, W4_ASYM) + weight).abs().max() <= 0.51 * scale.max()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"codes": torch.zeros(2, 64)}, TypeError),
        ({"scale": torch.ones(2, 3)}, ValueError),
        ({"zero_point": torch.zeros(2, 2, dtype=torch.uint8)}, ValueError),
        ({"scheme": W4_ASYM}, ValueError),
        ({"scheme": W4_ASYM, "zero_point": torch.zeros(2, 1, dtype=torch.uint8)}, ValueError),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(change, error):
    parts = {"codes": torch.zeros(2, 64, dtype=torch.uint8), "scale": torch.ones(2, 2), "zero_point": None, "scheme": W4}
    affine.QuantizedWeight(**parts)
    with pytest.raises(error):
        affine.QuantizedWeight(**{**parts, **change})


def test_eight_bit_activations_are_within_half_a_step_per_token():
    x = gaussian(2, 5, 48) * torch.tensor([0.01, 1.0, 100.0, 1.0, 0.0]).view(1, 5, 1)
    back = affine.fake_quantize_inputs(x)
    step = x.abs().amax(-1, keepdim=True) / 127.5
    assert ((back - x).abs() <= 0.51 * step + 1e-12).all()
    assert torch.equal(back[:, 4], x[:, 4])
    static = affine.fake_quantize_inputs(x, torch.tensor(0.5))
    assert torch.equal(static, (x / 0.5).round().clamp(-128, 127) * 0.5)
