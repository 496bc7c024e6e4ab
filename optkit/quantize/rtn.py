"""Round to nearest, with a search for the scale of each group.

A group of weights ``w`` gets a scale ``s`` and zero point ``z``, and each weight the nearest code. The range gives a first pair
(affine.py: the peak on the end of the grid, or min and max). ``search="mse"`` tries others around it and keeps, for each group
by itself, the one with the least weighted squared error ``sum_i h_i (w_i - q_i)²``. Scales are tried as they will be stored,
and the range's own is among them, so no group gets worse than without the search.

With ``statistics`` ``h`` is the mean square of each input, ``diag(H)`` in the notation of GPTQ (Frantar et al. 2022): the error
of the layer's output, were inputs uncorrelated. Tried are

* symmetric: ``f`` times the range's scale, at 4 bits for ``f`` of both signs (peak on code 0, or on the last code), then the
  least-squares scale of the codes found, ``s = <w, c>_h / <c, c>_h``, and the nearest codes for that.
* asymmetric: a narrower range around its centre, each with the zero points one up and one down, then the least-squares scale.

Without, nothing tells which weights may be clipped, and clipping the wrong ones is worse than the error says. On SmolLM2-135M
(4 bits, groups of 32, fp32 27.6) that search with ``h = 1`` lowers the squared error of the weights by 10 % and raises
perplexity from 35.1 to 39.1, while with ``diag(H)`` it raises the error by 10 % and lowers perplexity to 30.9. So the data-free
search keeps the largest weights whole: symmetric, only scales that cover the peak, with ``h = 1`` (error 3 to 8 % lower,
perplexity the same); asymmetric, with ``h = w²`` (perplexity 3 % lower than the plain range).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from optkit.checkpoint.affine import QuantizedWeight, grouped, peak_scale, quantize, range_scale, safe_scale
from optkit.checkpoint.model import Checkpoint, is_transposed
from optkit.errors import UsageError
from optkit.quantize.plan import Plan
from optkit.recipe import QuantizeRecipe
from optkit.scheme import QuantScheme, check_group_sizes

CHUNK = 1 << 18  # weights worked on at a time: 1 MB of float32; measured fastest, and it bounds the memory of the search
SEARCHES = ("mse", "minmax")
SYMMETRIC_FACTORS = (*(1.12 - 0.04 * i for i in range(10)), *(-1.26 + 0.04 * i for i in range(10)))
COVERING_FACTORS = tuple(1.02 + 0.02 * i for i in range(7))
RANGE_FACTORS = tuple(1.0 - 0.04 * i for i in range(8))
REFITS = 2

Grid = tuple[Tensor, Tensor | None]  # scale [O, G] and zero point [O, G], both float32; None for the fixed zero point


def quantize_linear(
    weight: Tensor,
    scheme: QuantScheme,
    statistics: Tensor | None = None,
    search: str = "mse",
    name: str = "weight",
) -> QuantizedWeight:
    """Quantizes one matrix by rounding to nearest.

    Args:
        weight: ``[O, I]`` floating point.
        scheme: bits, symmetry, group size.
        statistics: ``[I]``, how much the error of each input counts (the diagonal of the inputs' second moment), or ``None``.
        search: ``mse`` or ``minmax``.
        name: for error messages.

    Raises:
        UsageError: the group size does not divide ``I``; not a matrix; an unknown search; a weight that is not finite.
    """
    if weight.dim() != 2:
        raise UsageError(f"{name}: a matrix is quantized, and this has the shape {list(weight.shape)}")
    if search not in SEARCHES:
        raise UsageError(f"scale search {search!r} is not known; known: {', '.join(SEARCHES)}")
    check_group_sizes({name: (weight.shape[0], weight.shape[1])}, {name: scheme})
    if not bool(weight.isfinite().all()):
        raise UsageError(
            f"{name}: has weights that are NaN or infinite; the checkpoint is damaged or overflowed in its data type"
        )
    rows = max(1, CHUNK // weight.shape[1])
    parts = [_quantize_rows(part.float(), scheme, statistics, search) for part in weight.split(rows)]
    zero_points = [part.zero_point for part in parts if part.zero_point is not None]
    return QuantizedWeight(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(zero_points) if zero_points else None,
        scheme,
    )


def _quantize_rows(weight: Tensor, scheme: QuantScheme, statistics: Tensor | None, search: str) -> QuantizedWeight:
    scale, zero_point = range_scale(weight, scheme)
    if search == "mse":
        groups = grouped(weight, scheme)
        first = (scale, None if zero_point is None else zero_point.float())
        grid = _data_free(groups, first, scheme) if statistics is None else _weighted(groups, statistics, first, scheme)
        scale, zero_point = grid[0], None if grid[1] is None else grid[1].to(torch.uint8)
    return quantize(weight, scale, zero_point, scheme)


def _weighted(groups: Tensor, statistics: Tensor, first: Grid, scheme: QuantScheme) -> Grid:
    """The best grid of each group by the error that ``statistics [I]`` weights."""
    importance = statistics.float().unflatten(-1, groups.shape[1:])
    grids = _scaled(groups, scheme, SYMMETRIC_FACTORS) if scheme.symmetric else _narrowed(groups, scheme)
    return _best(groups, importance, first, grids, REFITS, scheme)


def _data_free(groups: Tensor, first: Grid, scheme: QuantScheme) -> Grid:
    """The best grid of each group when nothing is known of the inputs."""
    if scheme.symmetric:
        return _best(groups, None, first, _scaled(groups, scheme, COVERING_FACTORS), 0, scheme)
    return _best(groups, groups.square(), first, _narrowed(groups, scheme), REFITS, scheme)


def _best(
    groups: Tensor, importance: Tensor | None, first: Grid, grids: Iterable[Grid], refits: int, scheme: QuantScheme
) -> Grid:
    """The best grid of each group, starting with ``first``, which is the answer unless another is better."""
    best, least = first, _error(groups, importance, first, scheme)
    for grid in grids:
        best, least = _better(groups, importance, grid, best, least, scheme)
    for _ in range(refits):
        best, least = _better(groups, importance, _refit(groups, importance, best, scheme), best, least, scheme)
    return best


def _better(
    groups: Tensor, importance: Tensor | None, grid: Grid, best: Grid, least: Tensor, scheme: QuantScheme
) -> tuple[Grid, Tensor]:
    error = _error(groups, importance, grid, scheme)
    wins = error < least
    zero_point = None if grid[1] is None or best[1] is None else torch.where(wins, grid[1], best[1])
    return (torch.where(wins, grid[0], best[0]), zero_point), torch.where(wins, error, least)


def _steps(groups: Tensor, grid: Grid, scheme: QuantScheme) -> Tensor:
    """``code - zero_point`` of the nearest codes, ``[O, G, g]``."""
    offset = float(scheme.zero_point) if grid[1] is None else grid[1].unsqueeze(-1)
    codes = (groups / grid[0].unsqueeze(-1)).add_(offset).round_().clamp_(0, scheme.code_max)
    return codes.sub_(offset)


def _error(groups: Tensor, importance: Tensor | None, grid: Grid, scheme: QuantScheme) -> Tensor:
    """(Weighted) squared error of each group, ``[O, G]``."""
    error = _steps(groups, grid, scheme).mul_(grid[0].unsqueeze(-1)).sub_(groups).square_()
    return (error if importance is None else error.mul_(importance)).sum(-1)


def _refit(groups: Tensor, importance: Tensor | None, grid: Grid, scheme: QuantScheme) -> Grid:
    """The least-squares scale for the codes of ``grid``; its own where that is not defined."""
    steps = _steps(groups, grid, scheme)
    weighted = steps if importance is None else steps * importance
    scale = (weighted * groups).sum(-1) / (weighted * steps).sum(-1)
    usable = scale.isfinite() & (scale != 0)
    return safe_scale(torch.where(usable, scale, grid[0])), grid[1]


def _scaled(groups: Tensor, scheme: QuantScheme, factors: Iterable[float]) -> Iterator[Grid]:
    """The scale of the range times each factor; 8-bit scales stay positive."""
    base = peak_scale(groups, scheme)
    for factor in (f for f in factors if f > 0 or scheme.num_bits == 4):
        yield safe_scale(base * factor), None


def _narrowed(groups: Tensor, scheme: QuantScheme) -> Iterator[Grid]:
    """Narrower ranges around the centre of the range, with zero points beside the nearest."""
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    for factor in RANGE_FACTORS:
        scale = safe_scale((high - low) * (factor / scheme.code_max))
        centre = (scheme.code_max / 2 - (high + low) / 2 / scale).round_()
        for shift in (0, 1, -1):
            yield scale, (centre + shift).clamp(0, scheme.code_max)


class Rtn:
    """The solver of ``method: rtn``, and what the solvers of other methods are derived from.

    A solver is made with everything it may need, answers for one module at a time, and keeps nothing it has answered.
    """

    def __init__(self, source: Checkpoint, plan: Plan, recipe: QuantizeRecipe, progress: Callable[..., Any]) -> None:
        self.source, self.plan, self.recipe, self.progress = source, plan, recipe, progress

    def target(self, module: str) -> Tensor:
        """The float32 matrix ``[O, I]`` that the codes of ``module`` approximate."""
        weight = self.source.tensor_for(f"{module}.weight")()
        return weight.T.contiguous() if is_transposed(self.source.sources.model.get_submodule(module)) else weight

    def quantize(self, module: str) -> QuantizedWeight:
        """The codes and scales of one module of the plan."""
        return quantize_linear(self.target(module), self.plan.schemes[module], search=self.recipe.scale_search, name=module)

    def changed(self, parameter: str) -> Tensor | None:
        """The new value of a floating-point parameter this method edits, or ``None``."""
        return None

    def facts(self) -> dict[str, Any]:
        """What the manifest should say of the run, beside the recipe."""
        return {}

    def close(self) -> None:
        """Called once when the output directory is complete."""
