"""Sums over inputs: against float64, with weights, outliers and smoothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optkit.quantize import statistics
from optkit.quantize.statistics import NORM_CAP, Statistics, cap_norms
from tests.quantize.test_gptq import correlated


def exact(x: Tensor, weights: Tensor | None = None) -> Tensor:
    x = x.double()
    return (x if weights is None else x * weights.double().unsqueeze(1)).T @ x


@pytest.mark.parametrize("inputs", [8, 64, 200, 577])
def test_the_second_moment_is_the_mean_outer_product(inputs: int) -> None:
    x = torch.randn(300, inputs, generator=torch.Generator().manual_seed(0))
    found = Statistics(inputs)
    for part in x.split(70):
        found.add(part)
    torch.testing.assert_close(found.hessian.double(), exact(x) / 300, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.hessian, found.hessian.T)
    torch.testing.assert_close(found.diagonal, found.magnitude.square())
    assert found.tokens == 300


def test_weighted_tokens_are_averaged_with_the_plain_sum_at_equal_trace() -> None:
    x, weights = correlated(64), torch.rand(512, generator=torch.Generator().manual_seed(1)) * 2
    found = Statistics(64)
    found.add(x, weights)
    plain, weighted = exact(cap_norms(x)), exact(x, weights)
    expected = (plain + weighted * plain.trace() / weighted.trace()) / 2 / 512
    torch.testing.assert_close(found.hessian.double(), expected, rtol=1e-3, atol=1e-3)


def test_a_huge_token_counts_as_one_at_the_cap() -> None:
    x = torch.randn(101, 16, generator=torch.Generator().manual_seed(2))
    x[50] *= 1e4
    capped = cap_norms(x)
    median = x.norm(dim=1).median()
    assert float(capped[50].norm()) == pytest.approx(float(NORM_CAP * median), rel=1e-4)
    assert torch.equal(capped[:50], x[:50])


def test_dividing_the_inputs_afterwards_is_dividing_them_before() -> None:
    x = torch.randn(512, 32, generator=torch.Generator().manual_seed(3))  # no token near the cap, before or after
    s = torch.rand(32, generator=torch.Generator().manual_seed(4)) + 0.5
    after, before = Statistics(32), Statistics(32)
    after.add(x)
    after.divide(s)
    before.add(x / s)
    torch.testing.assert_close(after.peak, before.peak)
    torch.testing.assert_close(after.sample, before.sample)
    torch.testing.assert_close(after.hessian, before.hessian, rtol=1e-4, atol=1e-5)


def test_only_the_upper_triangle_is_computed_and_it_is_right() -> None:
    x = torch.randn(40, 300, generator=torch.Generator().manual_seed(4))
    total = torch.zeros(300, 300)
    statistics.add_upper(total, x)
    torch.testing.assert_close(total.triu(), (x.T @ x).triu(), rtol=1e-4, atol=1e-4)


def test_nothing_added_is_zero_and_not_nan() -> None:
    found = Statistics(8)
    found.add(torch.zeros(0, 8))
    assert found.tokens == 0
    assert not bool(found.hessian.any())
    assert found.sample.shape == (0, 8)
