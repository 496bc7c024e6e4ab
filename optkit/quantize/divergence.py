"""How far a quantized model's next-token distributions are from the original's, on text that nothing was fitted to.

``KL(p ‖ q) = Σ_v p_v (log p_v - log q_v)`` in nats, averaged over positions. Both models run block by block (capture.py), so
that one block is in memory at a time; of the original, the last hidden states are kept and its logits made anew when needed.
The embedding and lm_head are the original's: what is compared are the blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optkit.checkpoint.model import Checkpoint
from optkit.quantize.calibration import load_calibration
from optkit.quantize.capture import BlockModel, precision
from optkit.recipe import CalibrationRecipe

TEXTS = 4  # held-out texts of the calibration's length

Install = Callable[[int, nn.Module], None]


def held_out_tokens(recipe: CalibrationRecipe, directory: Path, model: Any = None) -> Tensor:
    """``[TEXTS, S]`` tokens of the calibration source that the calibration itself does not use."""
    more = dataclasses.replace(recipe, samples=recipe.samples + TEXTS)
    return load_calibration(more, directory, model).tokens[-TEXTS:]


def mean_kl(reference: Tensor, candidate: Tensor) -> float:
    """Mean over positions, from logits ``[..., V]``."""
    p, q = reference.float().log_softmax(-1), candidate.float().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


class Divergence:
    """Measures candidates against a checkpoint on ``tokens [N, S]``.

    Args:
        checkpoint: the original.
        linears: names that are quantized; the blocks are those they are in.
        tokens: the text.
        directory: for activations beyond the memory budget.
    """

    def __init__(self, checkpoint: Checkpoint, linears: Collection[str], tokens: Tensor, directory: Path) -> None:
        self.model = BlockModel(checkpoint, linears, tokens, directory)
        self.model.load_outside()
        self.model.note_calls()
        self._final = self._through(lambda index, block: None)

    def _through(self, install: Install) -> list[Tensor]:
        """Last hidden states of each batch, of the model whose blocks ``install`` has changed."""
        model = self.model
        hidden = [model.first_hidden.read(rows) for rows in model.rows]
        with torch.no_grad(), precision():
            for index in range(len(model.names)):
                with model.loaded(index) as block:
                    install(index, block)
                    hidden = [model.run(index, block, batch, x).float() for batch, x in enumerate(hidden)]
        return hidden

    def kl(self, install: Install) -> float:
        """Mean KL, nats, of the model whose blocks ``install(index, block)`` changes."""
        return self.kl_of(self._through(install))

    def kl_of(self, final: list[Tensor]) -> float:
        """Mean KL from the last hidden states ``[b, S, D]`` of each batch."""
        total = 0.0
        with torch.no_grad(), precision():
            for text, (ours, theirs) in enumerate(zip(torch.cat(final), torch.cat(self._final), strict=True)):
                rows = slice(text, text + 1)
                total += mean_kl(self.model.head(rows, theirs[None]), self.model.head(rows, ours[None]))
        return total / len(self.model.tokens)
