"""Descent on codes and scales: monotone, at a minimum when it stops, and exact where the answer is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optkit.quantize import rtn
from optkit.quantize.grid import Grid, codes_to_weight, from_quantized, storage_dtype
from optkit.quantize.rounding import descend_codes, refit_scales, row_errors
from optkit.scheme import QuantScheme
from tests.quantize.test_gptq import correlated, statistics_of

SCHEMES = [QuantScheme(4, group_size=32), QuantScheme(4, symmetric=False, group_size=16), QuantScheme(4, group_size=None)]


@pytest.fixture(params=SCHEMES, ids=QuantScheme.describe)
def case(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor, Tensor, Grid, int]:
    """Weight ``[24, 160]``, H, rounded codes and their grid, largest code."""
    scheme: QuantScheme = request.param
    weight = torch.randn(24, 160, generator=torch.Generator().manual_seed(1))
    hessian = statistics_of(correlated(160)).hessian
    return weight, hessian, *from_quantized(rtn.quantize_linear(weight, scheme)), scheme.code_max


def errors(weight: Tensor, hessian: Tensor, codes: Tensor, grid: Grid) -> Tensor:
    return row_errors(codes_to_weight(codes, grid).double() - weight.double(), hessian.double())


def test_no_row_gets_worse_by_a_sweep_over_its_codes(case: tuple[Tensor, Tensor, Tensor, Grid, int]) -> None:
    weight, hessian, codes, grid, top = case
    before = errors(weight, hessian, codes, grid)
    for _ in range(3):
        codes = descend_codes(weight, hessian, codes, grid, top)
        after = errors(weight, hessian, codes, grid)
        assert bool((after <= before * (1 + 1e-4)).all())
        before = after
    assert float(codes.min()) >= 0
    assert float(codes.max()) <= top


def test_the_sweeps_end_where_no_single_code_can_improve(case: tuple[Tensor, Tensor, Tensor, Grid, int]) -> None:
    weight, hessian, codes, grid, top = case
    codes = descend_codes(weight, hessian, codes, grid, top, sweeps=50)
    least = errors(weight, hessian, codes, grid)
    for column in range(0, 160, 7):
        for step in (-1, 1):
            other = codes.clone()
            other[:, column] = (other[:, column] + step).clamp(0, top)
            assert bool((errors(weight, hessian, other, grid) >= least * (1 - 1e-4)).all())


def test_refitted_scales_never_make_a_row_worse_and_help_most(case: tuple[Tensor, Tensor, Tensor, Grid, int]) -> None:
    weight, hessian, codes, grid, _ = case
    before = errors(weight, hessian, codes, grid)
    fitted = refit_scales(weight, hessian, codes, grid, torch.float16)
    after = errors(weight, hessian, codes, fitted)
    assert bool((after <= before * (1 + 1e-5)).all())
    assert float((after < before).float().mean()) > 0.8
    assert torch.equal(fitted.scale, fitted.scale.half().float())


def test_refitting_finds_the_scales_a_weight_was_made_with() -> None:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (12, 64), generator=generator).float()
    true = Grid((0.02 + 0.05 * torch.rand(12, 2, generator=generator)).half().float(), torch.full((12, 2), 8.0))
    weight = codes_to_weight(codes, true)
    wrong = Grid(true.scale * 1.1, true.zero_point)
    fitted = refit_scales(weight, statistics_of(correlated(64)).hessian, codes, wrong, torch.float16)
    torch.testing.assert_close(fitted.scale, true.scale, rtol=2**-8, atol=0)  # scales are stored with 8 significant bits


def test_a_group_of_zeros_keeps_its_scale() -> None:
    codes = torch.full((4, 64), 8.0)
    grid = Grid(torch.full((4, 2), 0.5), torch.full((4, 2), 8.0))
    fitted = refit_scales(torch.zeros(4, 64), torch.eye(64), codes, grid, torch.float16)
    assert torch.equal(fitted.scale, grid.scale)


def test_scales_that_half_precision_cannot_hold_are_kept_in_float32() -> None:
    assert storage_dtype(torch.tensor([0.01, -2.0])) == torch.float16
    assert storage_dtype(torch.tensor([0.01, 1e5])) == torch.float32
    assert storage_dtype(torch.tensor([0.01, 1e-7])) == torch.float32
