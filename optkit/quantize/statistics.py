"""What a linear's inputs look like over calibration text: the sums that every algorithm here works from.

``H [I, I]``, the mean of ``x_t x_tᵀ`` over calibration tokens ``t``, in float32; where it is known how much each token matters
(importance.py), averaged with the same sum under weights. Linears that read the same tensor share one object.

*Outliers.* A few tokens (the first of a text, delimiters) have inputs tens of times larger than the others in some layers, and
would own the sum though the model barely uses them. Token norms are capped at :data:`NORM_CAP` times the median.
"""

from __future__ import annotations

import torch
from torch import Tensor

NORM_CAP = 10.0
BLOCKS, MIN_BLOCK = 4, 64
SAMPLE_BATCHES, SAMPLE_TOKENS = 4, 64


class Statistics:
    """Sums over the inputs ``[T, I]`` of a group of linears.

    Tokens without a weight and tokens with one are summed apart, and each sum is scaled to the same trace before the two are
    averaged: weights of a few texts are noisy, and the average with the plain sum measured better than either
    (docs/quantization.md).

    Attributes:
        tokens: how many inputs were added.
        peak: ``[I]``, largest magnitude of each input.
    """

    def __init__(self, inputs: int) -> None:
        self.tokens = 0
        self.peak = torch.zeros(inputs)
        self._sample: list[Tensor] = []
        self._plain = torch.zeros(inputs, inputs)
        self._weighted: Tensor | None = None
        self._scale: Tensor | None = None

    def add(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Adds inputs ``x [T, I]``, with token weights ``[T]`` of mean about 1 where they are known."""
        if not len(x):
            return
        with torch.autocast("cpu", enabled=False):
            x = x.float()
            self.peak = torch.maximum(self.peak, x.abs().amax(0))
            if len(self._sample) < SAMPLE_BATCHES:
                self._sample.append(x[:: max(1, len(x) // SAMPLE_TOKENS)].clone())
            capped = cap_norms(x)
            add_upper(self._plain, capped)
            if weights is not None:
                if self._weighted is None:
                    self._weighted = torch.zeros_like(self._plain)
                x = x * weights.sqrt().unsqueeze(1)
                add_upper(self._weighted, x)
        self.tokens += len(x)

    @property
    def hessian(self) -> Tensor:
        """``H [I, I]``, symmetric, per token; zeros when nothing was added."""
        result = self._plain / max(self.tokens, 1)
        if self._weighted is not None:
            trace = self._weighted.trace()
            if float(trace) > 0:
                result = (result + self._weighted * (result.trace() / trace)) / 2
        result = result.triu() + result.triu(1).T
        return result if self._scale is None else result / (self._scale.unsqueeze(1) * self._scale)

    @property
    def diagonal(self) -> Tensor:
        """Mean square of each input, ``[I]``."""
        return self.hessian.diagonal()

    @property
    def magnitude(self) -> Tensor:
        """Root mean square of each input, ``[I]``."""
        return self.diagonal.sqrt()

    @property
    def sample(self) -> Tensor:
        """Some of the inputs, evenly spaced in the first batches: ``[n, I]``."""
        return torch.cat(self._sample) if self._sample else torch.zeros(0, len(self.peak))

    def divide(self, s: Tensor) -> None:
        """Makes these the statistics of the inputs divided by ``s [I]``."""
        self._scale = s if self._scale is None else self._scale * s
        self.peak = self.peak / s
        self._sample = [x / s for x in self._sample]


def add_upper(total: Tensor, x: Tensor) -> None:
    """Adds ``xᵀ x`` to the upper triangle of ``total [I, I]``: by column blocks, which saves three eighths of the product."""
    inputs = total.shape[0]
    size = max(MIN_BLOCK, -(-inputs // BLOCKS))
    for start in range(0, inputs, size):
        total[start : start + size, start:].addmm_(x[:, start : start + size].T, x[:, start:])


def cap_norms(x: Tensor) -> Tensor:
    """``x [T, I]`` with rows scaled down to :data:`NORM_CAP` times the median row norm."""
    norms = x.norm(dim=1, keepdim=True)
    limit = NORM_CAP * norms.median()
    if not bool((norms > limit).any()) or float(limit) == 0:
        return x
    return x * (limit / norms.clamp(min=1e-30)).clamp(max=1)
