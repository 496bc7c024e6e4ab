"""GPTQ: against a float64 reference written from the paper, on awkward weights, and against plain rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from optkit.checkpoint.affine import dequantize
from optkit.errors import VerificationError
from optkit.quantize import gptq, rtn
from optkit.quantize.grid import Grid, codes_to_weight, from_quantized
from optkit.quantize.rounding import row_errors
from optkit.quantize.statistics import Statistics
from optkit.scheme import QuantScheme

SCHEMES = [QuantScheme(4, group_size=32), QuantScheme(4, symmetric=False, group_size=32), QuantScheme(4, group_size=None)]


def correlated(inputs: int, tokens: int = 512, seed: int = 0) -> Tensor:
    """Inputs with strong correlations and unequal sizes, ``[T, I]``."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(inputs, inputs, generator=generator) / inputs**0.5 + torch.eye(inputs) * 0.3
    sizes = torch.exp(torch.randn(inputs, generator=generator))
    return torch.randn(tokens, inputs, generator=generator) @ mixing * sizes


def statistics_of(x: Tensor) -> Statistics:
    found = Statistics(x.shape[1])
    found.add(x)
    return found


def reference_gptq(weight: np.ndarray, hessian: np.ndarray, scale: np.ndarray, zero: np.ndarray, top: int) -> np.ndarray:
    """Codes, one weight at a time, in float64: the update of Frantar et al. 2022, eq. 2 and 3, by explicit inverses."""
    group = weight.shape[1] // scale.shape[1]
    order = list(np.argsort(-np.diag(hessian), kind="stable"))
    left, codes = weight.astype(np.float64).copy(), np.zeros_like(weight, dtype=np.float64)
    hessian = hessian.astype(np.float64) + gptq.DAMPING * np.diag(hessian).mean() * np.eye(len(hessian))
    for position, j in enumerate(order):
        rest = order[position:]
        inverse = np.linalg.inv(hessian[np.ix_(rest, rest)])
        s, z = scale[:, j // group], zero[:, j // group]
        codes[:, j] = np.clip(np.round(left[:, j] / s + z), 0, top)
        error = (left[:, j] - (codes[:, j] - z) * s) / inverse[0, 0]
        left[:, rest] -= np.outer(error, inverse[0])
    return codes


def rounded_codes(weight: torch.Tensor, grid: Grid, code_max: int) -> torch.Tensor:
    at = torch.arange(weight.shape[1]) // (weight.shape[1] // grid.scale.shape[1])
    return (weight / grid.scale[:, at] + grid.zero_point[:, at]).round().clamp(0, code_max)


@pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)
def test_codes_equal_the_reference_except_at_rounding_ties(scheme: QuantScheme) -> None:
    inputs = 160  # more than one block of columns
    weight = torch.randn(24, inputs, generator=torch.Generator().manual_seed(1))
    hessian = statistics_of(correlated(inputs)).hessian
    _, grid = from_quantized(rtn.quantize_linear(weight, scheme, hessian.diagonal()))
    codes, rounded = gptq.gptq_codes(weight, hessian, grid, scheme.code_max)
    torch.testing.assert_close(codes, rounded_codes(rounded, grid, scheme.code_max))
    expected = reference_gptq(weight.numpy(), hessian.numpy(), grid.scale.numpy(), grid.zero_point.numpy(), scheme.code_max)
    rows_alike = (
        (codes.numpy() == expected).all(1).mean()
    )  # float32 decides a tie otherwise now and then, and the row goes on from there
    assert rows_alike >= 0.8
    error = float(row_errors(codes_to_weight(codes, grid) - weight, hessian).sum())
    reference_error = float(row_errors(codes_to_weight(torch.tensor(expected).float(), grid) - weight, hessian).sum())
    assert error == pytest.approx(reference_error, rel=0.01)


@pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)
def test_the_output_error_is_well_below_that_of_rounding_to_nearest(scheme: QuantScheme) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    x = correlated(128, seed=3)
    statistics = statistics_of(x)
    errors = [
        float(((dequantize(quantized) - weight) @ x.T).square().sum())
        for quantized in (gptq.quantize_linear(weight, scheme, statistics), rtn.quantize_linear(weight, scheme))
    ]
    assert errors[0] < 0.7 * errors[1]  # measured 0.27 to 0.45 of it


def test_stacked_linears_give_what_each_gives_alone() -> None:
    scheme = SCHEMES[0]
    statistics = statistics_of(correlated(64))
    first, second = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(4))
    stacked = gptq.quantize_linear(torch.cat((first, second)), scheme, statistics)
    alone = [gptq.quantize_linear(weight, scheme, statistics) for weight in (first, second)]
    assert torch.equal(stacked.codes, torch.cat([quantized.codes for quantized in alone]))
    assert torch.equal(stacked.scale, torch.cat([quantized.scale for quantized in alone]))


AWKWARD = {
    "zero group": lambda w: w.index_fill(1, torch.arange(32), 0.0),
    "all zero": torch.zeros_like,
    "constant group": lambda w: w.index_fill(1, torch.arange(32), 0.37),
    "outlier": lambda w: w.index_put((torch.tensor([3]), torch.tensor([5])), torch.tensor([1e4])),
    "positive": torch.abs,
    "negative": lambda w: -w.abs(),
    "denormals": lambda w: w * 1e-39,
}


@pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)
@pytest.mark.parametrize("kind", AWKWARD)
def test_awkward_weights_come_back_finite_and_zero_as_zero(kind: str, scheme: QuantScheme) -> None:
    """Public reports: AutoAWQ#498 and #577: NaN scales from groups of zeros."""
    weight = AWKWARD[kind](torch.randn(8, 64, generator=torch.Generator().manual_seed(5)))
    back = dequantize(gptq.quantize_linear(weight, scheme, statistics_of(correlated(64))))
    assert bool(back.isfinite().all())
    if kind == "all zero":
        assert not bool(back.any())


def test_an_input_that_is_always_zero_does_no_harm() -> None:
    x = correlated(64)
    x[:, 7] = 0
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(6))
    back = dequantize(gptq.quantize_linear(weight, SCHEMES[0], statistics_of(x)))
    assert float((back - weight).abs().max()) < 1.0


def test_a_singular_second_moment_is_handled_by_damping() -> None:
    x = correlated(64, tokens=8)
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(7))
    quantized = gptq.quantize_linear(weight, SCHEMES[0], statistics_of(x))
    assert bool(dequantize(quantized).isfinite().all())


def test_without_any_input_the_weight_is_rounded_to_nearest() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(8))
    quantized = gptq.quantize_linear(weight, SCHEMES[0], Statistics(64))
    assert torch.equal(quantized.codes, rtn.quantize_linear(weight, SCHEMES[0]).codes)


def test_activations_that_are_not_finite_are_an_error() -> None:
    x = correlated(64)
    x[0, 0] = float("inf")
    with pytest.raises(VerificationError, match="not finite"):
        gptq.quantize_linear(torch.randn(16, 64), SCHEMES[0], statistics_of(x))
