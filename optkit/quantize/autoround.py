"""``method: autoround``: AWQ and GPTQ, then learned rounding of each block (learned.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from optkit.quantize.awq import ALPHAS
from optkit.quantize.blocks import HELD_OUT, Options
from optkit.quantize.capture import Activations, precision
from optkit.quantize.importance import OUTPUT
from optkit.quantize.learned import Batch, Linear, learn, token_norms
from optkit.quantize.linear_groups import linear_weight, stored_weight
from optkit.quantize.methods import IMPORTANCE, AwqGptq
from optkit.quantize.workspace import BlockResult
from optkit.recipe import QuantizeRecipe

STEPS = {"fast": 25, "default": 60, "high": 200}


class AutoRound(AwqGptq):
    """``method: autoround``."""

    _rounded: dict[str, Tensor]

    @classmethod
    def choose(cls, recipe: QuantizeRecipe) -> Options:
        return Options(ALPHAS, IMPORTANCE[recipe.effort], steps=STEPS[recipe.effort])

    def _solve_block(self, index: int, block: nn.Module, hidden: Activations) -> BlockResult:
        self._rounded = {}
        return super()._solve_block(index, block, hidden)

    def note_rounded(self, weights: dict[str, Tensor]) -> None:
        self._rounded |= weights

    def refine(self, index: int, block: nn.Module, hidden: Activations, result: BlockResult) -> None:
        linears = {
            name: Linear(quantized, self._rounded.pop(name))
            if result.facts["layers"][name]["kept"] == "solved"
            else Linear(quantized, linear_weight(block, name))
            for name, quantized in result.weights.items()
        }
        batches = [partial(self._batch, index, block, hidden, batch) for batch in range(len(self._model.rows))]
        before, after = learn(linears, batches, self.options.steps, self.calibration.seed + index)
        result.facts["learned"] = {"before": before, "after": after, "kept": after < before}
        if after < before:
            result.weights = {name: linear.result() for name, linear in linears.items()}

    def _batch(self, index: int, block: nn.Module, hidden: Activations, batch: int) -> Batch:
        rows = self._model.rows[batch]
        assert self._exact is not None
        inputs, target = hidden.read(rows), self._exact.read(rows)
        texts = torch.arange(rows.start, rows.stop)
        known = self._weights[index].get(OUTPUT)
        weight = token_norms(target) if known is None or rows.stop > len(known) else known[texts]
        held = (texts % HELD_OUT == HELD_OUT - 1).unsqueeze(1)

        def run(weights: dict[str, Tensor]) -> Tensor:
            values: dict[str, Tensor] = {}
            for name, value in weights.items():
                values |= stored_weight(block, name, value)

            def call(*args: Any, **kwargs: Any) -> Any:
                return functional_call(block, values, args, kwargs)

            with precision():
                return self._model.run(index, call, batch, inputs)

        return Batch(run, target, weight * ~held, weight * held)
