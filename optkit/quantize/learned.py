"""Learned rounding: move codes and scales of a whole block together by signed gradients (AutoRound, Cheng et al. 2023,
arXiv:2309.05516).

GPTQ and its kin fit each linear to its own output. Here the quantized block, on the inputs that the quantized blocks before it
produce, is fitted to the output of the *unquantized* block on *unquantized* inputs, so that it also makes up for what was lost
before it. What is learned, for each weight, is where between two neighbouring codes it is rounded from (an offset ``v`` within
half a step), and for each group a factor on its scale. A step adds ``-rate * sign(gradient)``, taken straight through the
rounding, with a rate that falls linearly to zero; over all steps an offset can travel half a step, so a weight can reach the
code next to its own and no other.

What differs from the paper: it starts from the GPTQ result (each weight's offset is where it lay when GPTQ rounded it), not
from rounding to nearest; squared errors are weighted by token, by how much an error of the block's output there changes the
model's (importance.py), or where that is not known by ``1 / |y|²`` down to the median, so that tokens of huge norm do not own
the sum; and the result is kept only if it is better on held-out texts than what it started from.

Cost: a forward and a backward pass of the block for each step of one batch. Memory: four float32 copies of the block's
weights, and the activations of one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optkit.checkpoint.affine import QuantizedWeight, safe_scale
from optkit.quantize.grid import Grid, from_quantized, storage_dtype, to_quantized

SCALE_RATE = 0.1  # of the offsets' rate: factors on scales move within 1 ± 0.05


@dataclass
class Batch:
    """A batch of calibration texts.

    Attributes:
        run: the block with these weights (linear -> ``[O, I]``) on the batch: ``[b, S, D]``.
        target: what it should give, ``[b, S, D]`` float32.
        weight: ``[b, S]`` of each token's squared error in the sum that is minimised.
        held: the same for the comparison of results; tokens have one or the other.
    """

    run: Callable[[dict[str, Tensor]], Tensor]
    target: Tensor
    weight: Tensor
    held: Tensor


class Linear:
    """What is learned about one linear.

    Args:
        quantized: the start.
        latent: ``[O, I]``, the weights GPTQ rounded, each as it stood when its turn came.
    """

    def __init__(self, quantized: QuantizedWeight, latent: Tensor) -> None:
        self.scheme = quantized.scheme
        codes, self.grid = from_quantized(quantized)
        self.shape = codes.shape
        start = self._grouped(codes)
        zero, scale = self.grid.zero_point.unsqueeze(-1), self.grid.scale.unsqueeze(-1)
        self.base = torch.minimum(torch.maximum(self._grouped(latent) / scale + zero, start - 0.499), start + 0.499)
        self.offset = torch.zeros_like(self.base)
        self.factor = torch.ones_like(self.grid.scale)
        self.sign = scale.sign()

    def _grouped(self, values: Tensor) -> Tensor:
        return values.reshape(values.shape[0], self.grid.scale.shape[1], -1)

    def codes(self) -> Tensor:
        """``[O, G, g]`` float32."""
        return (self.base + self.offset).round_().clamp_(0, self.scheme.code_max)

    def weight(self) -> Tensor:
        """``[O, I]``."""
        scale = (self.grid.scale * self.factor).unsqueeze(-1)
        return self.codes().sub_(self.grid.zero_point.unsqueeze(-1)).mul_(scale).view(self.shape)

    def step(self, gradient: Tensor, rate: float) -> None:
        """Moves against ``gradient [O, I]`` of the loss."""
        gradient = self._grouped(gradient)
        centred = self.codes().sub_(self.grid.zero_point.unsqueeze(-1))
        by_scale = (centred.mul_(gradient)).sum(-1) * self.sign.squeeze(-1)
        self.factor.sub_(by_scale.sign_(), alpha=rate * SCALE_RATE)
        self.offset.sub_(gradient.sign().mul_(self.sign), alpha=rate).clamp_(-0.5, 0.5)

    def result(self) -> QuantizedWeight:
        storage = storage_dtype(self.grid.scale)
        grid = Grid(safe_scale(self.grid.scale * self.factor, storage), self.grid.zero_point)
        return to_quantized(self.codes().view(self.shape), grid, self.scheme)


def learn(linears: dict[str, Linear], batches: Sequence[Callable[[], Batch]], steps: int, seed: int) -> tuple[float, float]:
    """Trains ``linears`` in place.

    Args:
        linears: by name.
        batches: each makes one batch; used in a seeded order.
        steps: how many batches are looked at; 0 changes nothing.
        seed: of the order.

    Returns:
        The held-out loss before and after.
    """
    before = held_out(linears, batches)
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for step in range(steps):
        order = order or torch.randperm(len(batches), generator=generator).tolist()
        batch = batches[order.pop()]()
        weights = {name: linear.weight().requires_grad_(True) for name, linear in linears.items()}
        with torch.enable_grad():
            loss = weighted_error(batch.run(weights), batch.target, batch.weight)
            gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        for linear, gradient in zip(linears.values(), gradients, strict=True):
            if gradient is not None:
                linear.step(gradient.float(), (1 - step / steps) / steps)
    return before, held_out(linears, batches)


@torch.no_grad()
def held_out(linears: dict[str, Linear], batches: Sequence[Callable[[], Batch]]) -> float:
    """The loss on the held-out tokens."""
    weights = {name: linear.weight() for name, linear in linears.items()}
    total = 0.0
    for make in batches:
        batch = make()
        if bool(batch.held.any()):
            total += float(weighted_error(batch.run(weights), batch.target, batch.held))
    return total


def weighted_error(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """``Σ_t w_t |y_t - y'_t|²`` of ``[b, S, D]`` outputs and ``[b, S]`` weights."""
    return ((output.float() - target).square().sum(-1) * weight).sum()


def token_norms(target: Tensor) -> Tensor:
    """``1 / |y_t|²`` of ``[b, S, D]``, at most that of the median token: ``[b, S]`` of mean about 1."""
    squares = target.square().sum(-1)
    middle = squares.median().clamp(min=torch.finfo(torch.float32).tiny)
    return middle / torch.maximum(squares, middle)
