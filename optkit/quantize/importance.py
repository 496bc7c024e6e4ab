"""How much each calibration token matters at each linear, from one backward pass.

A layer's squared error counts all tokens and outputs alike; what the model loses does not. To second order the divergence (KL)
of the quantized model's next-token distribution from the original's is ``½ Σ_t (J_t e_t)ᵀ F (J_t e_t)``, with ``e_t`` the
error of a linear's output at token ``t`` and ``F`` the Fisher matrix; replaced by its trace over outputs it is ``Σ_t w_t
|e_t|²`` with ``w_t = |∂ℓ/∂y_t|²`` for the log-likelihood ``ℓ`` of tokens *sampled from the model's own distribution* (the true
Fisher, not the empirical one of the text's tokens). So the statistics of a linear become ``H = Σ_t w_t x_t x_tᵀ``: tokens
whose error dies out on the way count little (compare GuidedQuant, arXiv:2505.07004, and YAQA, arXiv:2505.22988, which keep
more of the matrix).

Linears that read one tensor share a weight: the mean of theirs, each normalised to mean 1. Weights are capped at :data:`CAP`
times the mean, since one sample of a heavy-tailed quantity says little about its tail.

Cost: a forward pass that keeps each block's input (in memory or in a file), the head, and for each block from the last to the
first a forward pass with gradients of activations only. One block is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optkit.quantize.capture import Activations, BlockModel, precision

CAP = 20.0

Weights = dict[str, Tensor]
OUTPUT = "output"  # in the place of a linear's name: the block's own output


def token_weights(
    model: BlockModel,
    groups: Callable[[int, nn.Module], Sequence[Sequence[str]]],
    batches: int,
    directory: Path,
    report: Callable[[int, int], None],
    seed: int = 0,
) -> list[Weights]:
    """For each block, ``linear name -> w [n, S]`` (mean 1) on the first ``batches`` token batches, and the same of the block's
    output under :data:`OUTPUT`.

    Args:
        model: after :meth:`BlockModel.note_calls`, with what is outside the blocks loaded.
        groups: gives the groups of linears that share an input, for a block that is loaded.
        batches: how many of the model's batches to look at.
        directory: for activations that do not fit the memory budget.
        report: called with ``(done, total)``.
        seed: of the sampled tokens.
    """
    count, total = len(model.names), 2 * len(model.names) + 1
    rows = model.rows[:batches]
    shape = (rows[-1].stop, *model.first_hidden.shape[1:])
    inputs = [Activations(shape, directory / f"input-{i}.f32", budget=model.budget // (count + 1)) for i in range(count + 1)]
    for part in rows:
        inputs[0].write(part, model.first_hidden.read(part))
    with torch.no_grad(), precision():
        for index in range(count):
            report(index, total)
            with model.loaded(index) as block:
                for batch, part in enumerate(rows):
                    inputs[index + 1].write(part, model.run(index, block, batch, inputs[index].read(part)))
    gradient = inputs[count]
    generator = torch.Generator().manual_seed(seed)
    for text in range(shape[0]):
        part = slice(text, text + 1)
        gradient.write(part, _head_gradient(model, part, gradient.read(part), generator))
    result: list[Weights] = [{} for _ in range(count)]
    for index in reversed(range(count)):
        report(2 * count - index, total)
        with model.loaded(index) as block:
            found = [
                _block_gradient(model, index, block, batch, inputs[index].read(part), gradient, part)
                for batch, part in enumerate(rows)
            ]
            norms = {name: torch.cat([squares[name] for squares in found]) for name in found[0]}
            result[index] = shared_weights(norms, [*groups(index, block), [OUTPUT]])
        inputs[index].close()
    gradient.close()
    return result


def _head_gradient(model: BlockModel, rows: slice, hidden: Tensor, generator: torch.Generator) -> Tensor:
    """Gradient of the log-likelihood of sampled tokens with respect to the last hidden states, ``[b, S, D]``."""
    with torch.enable_grad():
        hidden = hidden.requires_grad_(True)
        with precision():
            logits = model.head(rows, hidden).float()
        with torch.no_grad():
            drawn = torch.multinomial(logits.softmax(-1).flatten(0, 1), 1, generator=generator).squeeze(-1)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), drawn, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, hidden)
    return gradient


def _block_gradient(
    model: BlockModel, index: int, block: nn.Module, batch: int, hidden: Tensor, gradient: Activations, rows: slice
) -> Weights:
    """Squared output-gradient norms ``[b, S]`` of the block's linears and of the block; moves ``gradient`` to the block's
    input."""
    outputs: dict[str, Tensor] = {}
    incoming = gradient.read(rows)

    def hook(name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Tensor) -> None:
            outputs[name] = output

        return after

    handles = [block.get_submodule(name).register_forward_hook(hook(name)) for name in model.linears[index]]
    try:
        with torch.enable_grad():
            hidden = hidden.requires_grad_(True)
            with precision():
                result = model.run(index, block, batch, hidden)
            names = [name for name, output in outputs.items() if output.requires_grad]
            found = torch.autograd.grad(
                result, [hidden, *(outputs[name] for name in names)], incoming.to(result.dtype), allow_unused=True
            )
    finally:
        for handle in handles:
            handle.remove()
    gradient.write(rows, torch.zeros_like(hidden) if found[0] is None else found[0])
    squares = {name: g.float().square().sum(-1) for name, g in zip(names, found[1:], strict=True) if g is not None}
    squares[OUTPUT] = incoming.square().sum(-1)
    return {name: value for name, value in squares.items() if value.shape == hidden.shape[:2]}


def shared_weights(norms: Mapping[str, Tensor], groups: Sequence[Sequence[str]]) -> Weights:
    """Mean-1 weights, equal for the linears of a group; a linear without a gradient for every token gets none."""
    result: Weights = {}
    for group in groups:
        parts = [norms[name] / norms[name].mean().clamp(min=1e-30) for name in group if name in norms]
        if len(parts) == len(group):
            weight = torch.stack(parts).mean(0).clamp(max=CAP)
            result |= {name: weight / weight.mean().clamp(min=1e-30) for name in group}
    return result
