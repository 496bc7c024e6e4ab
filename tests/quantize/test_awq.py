"""AWQ's scale: it lowers the output error it is scored by, folds exactly, and is equal where one row feeds several channels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optkit.checkpoint.affine import dequantize
from optkit.quantize import rtn
from optkit.quantize.awq import power_scale, sample_rows, smooth_group
from optkit.quantize.linear_groups import LinearProducer
from optkit.quantize.statistics import Statistics
from optkit.scheme import QuantScheme
from tests.quantize.test_gptq import statistics_of

SCHEME = QuantScheme(4, group_size=32)


def salient(tokens: int = 256) -> Tensor:
    """Inputs ``[T, 64]`` of which few channels are thirty times larger."""
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(0))
    x[:, [3, 17, 40]] *= 30
    return x


def output_error(weight: Tensor, x: Tensor, s: Tensor) -> float:
    rounded = dequantize(rtn.quantize_linear(weight * s, SCHEME, search="minmax")) / s
    return float(((rounded - weight) @ x.T).square().sum())


def test_the_chosen_scale_lowers_the_output_error_by_what_it_says() -> None:
    weights = [torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    x = salient()
    found = smooth_group(lambda s: s, weights, statistics_of(x), SCHEME)
    stacked = torch.cat(weights)
    assert found.alpha > 0
    measured = output_error(stacked, x, found.scale) / output_error(stacked, x, torch.ones(64))
    assert found.gain == pytest.approx(measured, rel=0.05)
    assert found.gain < 0.5


def test_nothing_is_scaled_when_no_scale_helps() -> None:
    identity = torch.eye(64)  # exactly representable: the error is 0 without any scale
    found = smooth_group(lambda s: s, [identity], statistics_of(salient()), SCHEME)
    assert found.alpha == 0
    assert torch.equal(found.scale, torch.ones(64))


def test_channels_fed_by_one_row_share_a_scale() -> None:
    rows = torch.arange(64) // 32 * 16 + torch.arange(64) % 16  # 4 heads of 16, two of them on each value head
    producer = LinearProducer("v", rows, 32)
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(3))
    found = smooth_group(producer.reduce, [weight], statistics_of(salient()), SCHEME)
    for row in range(32):
        assert len(found.scale[rows == row].unique()) == 1


def test_a_channel_that_is_never_used_gets_a_finite_scale() -> None:
    magnitude = torch.tensor([0.0, 1.0, 4.0])
    s = power_scale(magnitude, 0.5)
    assert bool((s > 0).all() and s.isfinite().all())
    assert float(s[2] / s[1]) == pytest.approx(2.0)


def test_no_statistics_mean_no_scale() -> None:
    found = smooth_group(lambda s: s, [torch.randn(8, 64)], Statistics(64), SCHEME)
    assert found.alpha == 0


def test_rows_are_sampled_the_same_way_every_time() -> None:
    weight = torch.randn(100, 4)
    assert torch.equal(sample_rows(weight, 10), sample_rows(weight, 10))
    assert len(sample_rows(weight, 10).unique(dim=0)) == 10
