"""SmoothQuant: outliers move from inputs to weights, with dynamic and with static input scales."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optkit.checkpoint.affine import dequantize, safe_scale
from optkit.quantize import smoothquant
from optkit.quantize.smoothquant import fake_tokens, migration_scale, quantize_linear, static_scale, token_scale
from optkit.scheme import QuantScheme
from tests.quantize.test_awq import salient
from tests.quantize.test_gptq import statistics_of

DYNAMIC = QuantScheme(8, activation_bits=8)
STATIC = QuantScheme(8, activation_bits=8, dynamic_activations=False)


def quantized_output_error(weight: Tensor, x: Tensor, s: Tensor, dynamic: bool) -> float:
    rounded = dequantize(quantize_linear(weight * s, DYNAMIC, statistics_of(x / s)))
    inputs = x / s
    scale = token_scale(inputs) if dynamic else inputs.abs().max() / 127
    return float((fake_tokens(inputs, scale) @ rounded.T - x @ weight.T).square().mean())


@pytest.mark.parametrize("scheme", [DYNAMIC, STATIC], ids=["dynamic", "static"])
def test_smoothing_lowers_the_error_of_8_bit_inputs_with_outliers(scheme: QuantScheme) -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    x = salient()
    found = smoothquant.smooth_group(lambda s: s, [weight], statistics_of(x), scheme)
    assert found.alpha > 0
    after = quantized_output_error(weight, x, found.scale, scheme.dynamic_activations)
    assert after < 0.5 * quantized_output_error(weight, x, torch.ones(64), scheme.dynamic_activations)


def test_the_migration_scale_is_the_papers_formula_up_to_a_common_factor() -> None:
    peak, column = torch.tensor([8.0, 2.0, 0.0]), torch.tensor([0.5, 2.0, 1.0])
    s = migration_scale(peak, column, 0.25)
    expected = (8.0**0.25 / 0.5**0.75) / (2.0**0.25 / 2.0**0.75)
    assert float(s[0] / s[1]) == pytest.approx(expected, rel=1e-5)
    assert bool(s.isfinite().all())


def test_a_static_scale_is_stored_and_clips_the_tail_when_that_is_better() -> None:
    x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(2))
    x[::256] *= 200  # a few huge tokens, and steps two hundred times as coarse would round all others to nothing
    statistics = statistics_of(x)
    quantized = quantize_linear(torch.randn(8, 64), STATIC, statistics)
    assert quantized.input_scale is not None
    assert torch.equal(quantized.input_scale, safe_scale(static_scale(statistics)))
    peak = float(statistics.peak.max()) / 127
    assert 0 < float(quantized.input_scale) < 0.95 * peak
    sample = statistics.sample
    zeros = [float((fake_tokens(sample, scale) == 0).float().mean()) for scale in (quantized.input_scale, torch.tensor(peak))]
    assert zeros[0] < zeros[1]
    assert quantize_linear(torch.randn(8, 64), DYNAMIC, statistics).input_scale is None


def test_token_scales_cover_each_token() -> None:
    x = salient(32)
    assert float((fake_tokens(x, token_scale(x)) - x).abs().max()) <= float(token_scale(x).max()) / 2 * 1.001
    assert bool(token_scale(torch.zeros(2, 4)).isfinite().all())
