"""Choosing by measurement: the best method (``auto``), and the smallest mix of 4 and 8 bits within a budget (``max_kl``).

*auto* quantizes with each method that suits the scheme and keeps the one with the least KL on held-out text (divergence.py).
What each reached is in the manifest.

*max_kl.* A *unit* is the linears with one input in one block (q, k and v together: a runtime fuses them). Every unit is solved
at 4 and at 8 bits. Its sensitivity is measured: the KL of the model in which that unit alone has 4 bits. All units are
measured in one sweep over the blocks that carries one set of hidden states for each unit met so far. Units go to 4 bits in the
order of least KL for each byte saved; how many can, is found by bisection on the *measured* KL of the whole mix, because
errors of units do not just add up. Every mix measured on the way is a point of the curve in the manifest: bytes of the blocks'
weights against KL.

Cost of the sweep: ``units · blocks / 2`` block runs over :data:`SWEEP_TEXTS` short texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optkit.checkpoint.affine import QuantizedWeight
from optkit.checkpoint.model import Checkpoint
from optkit.errors import UsageError
from optkit.quantize import rtn
from optkit.quantize.blocks import Calibrated, install
from optkit.quantize.capture import precision
from optkit.quantize.divergence import Divergence, held_out_tokens
from optkit.quantize.methods import Awq, AwqGptq, Gptq
from optkit.quantize.plan import Plan
from optkit.quantize.rtn import Rtn
from optkit.quantize.smoothquant import SmoothQuant
from optkit.quantize.statistics import Statistics
from optkit.quantize.workspace import BlockResult
from optkit.recipe import QuantizeRecipe
from optkit.scheme import QuantScheme

SWEEP_TEXTS, SWEEP_TOKENS = 2, 256


def _held_out(source: Checkpoint, recipe: QuantizeRecipe) -> Tensor:
    model = source.load() if recipe.calibration.source == "self" else None
    return held_out_tokens(recipe.calibration, source.directory, model)


def block_linears(plan: Plan) -> list[str]:
    """The quantized modules that are neither embedding nor lm_head."""
    return [name for name in plan.schemes if name not in (plan.embedding, plan.lm_head)]


class Auto(Rtn):
    """``method: auto``."""

    def __init__(self, source: Checkpoint, plan: Plan, recipe: QuantizeRecipe, progress: Callable[..., Any]) -> None:
        super().__init__(source, plan, recipe, progress)
        self._others: list[Rtn] = []
        tried = {name: method(source, plan, recipe, progress) for name, method in self.candidates(recipe).items()}
        calibrated = next(solver for solver in tried.values() if isinstance(solver, Calibrated))
        measure = Divergence(source, block_linears(plan), _held_out(source, recipe), calibrated.work.directory)
        self.measured: dict[str, float] = {}
        for name, solver in tried.items():
            progress(f"measuring {name}")
            self.measured[name] = measure.kl(self._installer(solver, measure))
        self.chosen = min(self.measured, key=self.measured.__getitem__)
        self._best = tried.pop(self.chosen)
        self._others = list(tried.values())

    @staticmethod
    def candidates(recipe: QuantizeRecipe) -> dict[str, type[Rtn]]:
        """The methods that are tried for a scheme."""
        if recipe.weights().activation_bits == 8:
            return {"rtn": Rtn, "smoothquant": SmoothQuant}
        return {"rtn": Rtn, "gptq": Gptq, "awq": Awq, "awq+gptq": AwqGptq}

    def _installer(self, solver: Rtn, measure: Divergence) -> Callable[[int, nn.Module], None]:
        def install_block(index: int, block: nn.Module) -> None:
            if isinstance(solver, Calibrated):
                install(block, solver.result(index))
                return
            prefix = measure.model.names[index]
            weights = {name: solver.quantize(f"{prefix}.{name}") for name in measure.model.linears[index]}
            install(block, BlockResult(weights=weights))

        return install_block

    def target(self, module: str) -> Tensor:
        return self._best.target(module)

    def quantize(self, module: str) -> QuantizedWeight:
        return self._best.quantize(module)

    def changed(self, parameter: str) -> Tensor | None:
        return self._best.changed(parameter)

    def facts(self) -> dict[str, Any]:
        return {**self._best.facts(), "auto": {"chosen": self.chosen, "kl": self.measured}}

    def close(self) -> None:
        for solver in (self._best, *self._others):
            solver.close()


@dataclass(frozen=True)
class Unit:
    """Linears that change their bits together.

    Attributes:
        block: index.
        linears: names inside the block.
        saved: bytes that 4 bits save against 8.
        kl: measured with this unit alone at 4 bits, above that of all at 8.
    """

    block: int
    linears: tuple[str, ...]
    saved: int
    kl: float = 0.0


class Mixed(AwqGptq):
    """What ``max_kl`` asks for."""

    def __init__(self, source: Checkpoint, plan: Plan, recipe: QuantizeRecipe, progress: Callable[..., Any]) -> None:
        super().__init__(source, plan, recipe, progress)
        assert recipe.max_kl is not None
        linears, tokens = block_linears(plan), _held_out(source, recipe)
        short = Divergence(source, linears, tokens[:SWEEP_TEXTS, :SWEEP_TOKENS], self.work.directory)
        self.units = order_units(sensitivities(short, self.result, self._unit_list()))
        whole = Divergence(source, linears, tokens, self.work.directory)
        self.curve: list[dict[str, float]] = []

        def measure(count: int) -> float:
            progress(f"measuring {count} of {len(self.units)} units at 4 bits")
            low = {(unit.block, name) for unit in self.units[:count] for name in unit.linears}
            kl = whole.kl(lambda index, block: install(block, mixed_result(self.result(index), index, low)))
            self.curve.append({"units": count, "bytes": self._bytes(low), "kl": kl})
            return kl

        count = most_units(measure, len(self.units), recipe.max_kl)
        self.low = {(unit.block, name) for unit in self.units[:count] for name in unit.linears}
        for index, block in enumerate(self._model.names):
            for name, quantized in mixed_result(self.result(index), index, self.low).weights.items():
                plan.schemes[f"{block}.{name}"] = quantized.scheme

    def solve_high(
        self, weights: Mapping[str, Tensor], schemes: Mapping[str, QuantScheme], statistics: Statistics
    ) -> dict[str, QuantizedWeight]:
        importance = statistics.diagonal if statistics.tokens else None
        return {
            name: rtn.quantize_linear(weight, dataclasses.replace(schemes[name], num_bits=8), importance)
            for name, weight in weights.items()
        }

    def _unit_list(self) -> list[Unit]:
        units = []
        for index in range(len(self._model.names)):
            result = self.result(index)
            for group in result.facts["groups"]:
                saved = sum(result.weights[name].codes.numel() // 2 for name in group["linears"])
                units.append(Unit(index, tuple(group["linears"]), saved))
        return units

    def _bytes(self, low: set[tuple[int, str]]) -> int:
        return sum(
            stored_bytes(quantized)
            for index in range(len(self._model.names))
            for quantized in mixed_result(self.result(index), index, low).weights.values()
        )

    def quantize(self, module: str) -> QuantizedWeight:
        if module not in self._places:
            return super().quantize(module)
        index, name = self._places[module]
        return mixed_result(self.result(index), index, self.low).weights[name]

    def facts(self) -> dict[str, Any]:
        units = [
            {"block": self._model.names[unit.block], "linears": unit.linears, "kl": unit.kl, "saved": unit.saved}
            for unit in self.units
        ]
        mixed = {"max_kl": self.recipe.max_kl, "curve": self.curve, "units": units, "four_bit_linears": len(self.low)}
        return {**super().facts(), "mixed": mixed}


def stored_bytes(quantized: QuantizedWeight) -> int:
    """Codes, float16 scales and zero points."""
    bits = quantized.scheme.num_bits
    zero = 0 if quantized.zero_point is None else quantized.zero_point.numel() * bits // 8
    return quantized.codes.numel() * bits // 8 + 2 * quantized.scale.numel() + zero


def mixed_result(result: BlockResult, index: int, low: set[tuple[int, str]]) -> BlockResult:
    """A block with 4 bits for the linears in ``low`` and 8 for the others."""
    weights = {name: kept if (index, name) in low else result.high[name] for name, kept in result.weights.items()}
    return dataclasses.replace(result, weights=weights)


def sensitivities(measure: Divergence, result: Callable[[int], BlockResult], units: Sequence[Unit]) -> list[Unit]:
    """The units with their KL filled in; see the module's first lines."""
    model = measure.model
    hidden = [model.first_hidden.read(rows) for rows in model.rows]
    carried: dict[Unit, list[Tensor]] = {}
    with torch.no_grad(), precision():
        for index in range(len(model.names)):
            found = result(index)
            with model.loaded(index) as block:
                for unit in (unit for unit in units if unit.block == index):
                    install(block, mixed_result(found, index, {(index, name) for name in unit.linears}))
                    carried[unit] = [model.run(index, block, batch, x).float() for batch, x in enumerate(hidden)]
                install(block, mixed_result(found, index, set()))
                for unit, states in carried.items():
                    if unit.block != index:
                        carried[unit] = [model.run(index, block, batch, x).float() for batch, x in enumerate(states)]
                hidden = [model.run(index, block, batch, x).float() for batch, x in enumerate(hidden)]
    base = measure.kl_of(hidden)
    return [dataclasses.replace(unit, kl=measure.kl_of(states) - base) for unit, states in carried.items()]


def order_units(units: Sequence[Unit]) -> list[Unit]:
    """Least KL for each byte saved first."""
    return sorted(units, key=lambda unit: (unit.kl / max(unit.saved, 1), unit.block))


def most_units(measure: Callable[[int], float], total: int, limit: float) -> int:
    """The largest count found whose measured KL is at most ``limit``, by bisection.

    Raises:
        UsageError: not even 8 bits everywhere stay below it.
    """
    if measure(total) <= limit:
        return total
    least = measure(0)
    if least > limit:
        raise UsageError(f"max_kl {limit:g}: 8 bits everywhere already measure {least:.3g} nats; allow more")
    low, high = 0, total
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if measure(middle) <= limit else (low, middle)
    return low
