"""Learned rounding: what it starts from, how far it may go, that it lowers the error it is given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import optkit
from optkit import manifest
from optkit.checkpoint.affine import dequantize
from optkit.checkpoint.model import Checkpoint, open_checkpoint
from optkit.quantize import autoround, gptq, rtn
from optkit.quantize.learned import Batch, Linear, learn, token_norms
from optkit.scheme import QuantScheme
from tests.quantize.test_blocks import checkpoint, recipe, text  # noqa: F401 (fixtures)
from tests.quantize.test_gptq import statistics_of

SCHEMES = [QuantScheme(4, group_size=32), QuantScheme(4, symmetric=False, group_size=32)]
INPUTS, OUTPUTS, TOKENS = 64, 48, 1024


def started() -> tuple[Tensor, Linear]:
    """A weight ``[O, I]`` and what GPTQ makes of it."""
    weight = random_weight()
    return weight, Linear(*gptq.quantize_and_trace(weight, SCHEMES[0], statistics_of(strong_directions())))


def random_weight() -> Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1))


def batches_of(weight: Tensor, x: Tensor) -> list[Callable[[], Batch]]:
    """Four batches of a block ``tanh(x W^T)``; a quarter of the texts is held out."""
    inputs = x.view(4, 4, -1, INPUTS)
    held = torch.zeros(inputs.shape[1:3])
    held[-1] = 1

    def make(x: Tensor) -> Batch:
        def run(weights: dict[str, Tensor]) -> Tensor:
            return torch.tanh(x @ weights["linear"].T)

        return Batch(run, run({"linear": weight}), 1 - held, held)

    return [partial(make, x) for x in inputs]


@pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)
def test_it_starts_from_the_result_of_gptq(scheme: QuantScheme) -> None:
    solved, rounded = gptq.quantize_and_trace(random_weight(), scheme, statistics_of(strong_directions()))
    linear = Linear(solved, rounded)
    torch.testing.assert_close(linear.weight(), dequantize(solved).float())
    assert torch.equal(linear.result().codes, solved.codes)
    assert torch.equal(linear.result().scale, solved.scale)


def strong_directions() -> Tensor:
    """Inputs with a few common directions much stronger than the rest, as hidden states have: ``[T, I]``."""
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(TOKENS, INPUTS, generator=generator)
    return own + torch.randn(TOKENS, 4, generator=generator) @ torch.randn(4, INPUTS, generator=generator)


@pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)
def test_training_lowers_the_error_on_texts_it_did_not_see_by_neighbouring_codes(scheme: QuantScheme) -> None:
    weight, x = random_weight(), strong_directions()
    linear = Linear(rtn.quantize_linear(weight, scheme), weight)
    first = linear.codes()
    before, after = learn({"linear": linear}, batches_of(weight, x), 100, seed=0)
    assert after < 0.7 * before
    moved = (linear.codes() - first).abs()
    assert 0 < float(moved.mean()) < 0.5
    assert float(moved.max()) == 1
    assert float((linear.factor - 1).abs().max()) <= 0.05 + 1e-6
    written = dequantize(linear.result()).float()
    torch.testing.assert_close(written, linear.weight(), rtol=2**-8, atol=0)  # bfloat16 scales


def test_no_steps_change_nothing() -> None:
    weight, linear = started()
    first = linear.weight()
    before, after = learn({"linear": linear}, batches_of(weight, strong_directions()), 0, seed=0)
    assert before == after > 0
    assert torch.equal(linear.weight(), first)


def test_held_out_tokens_are_not_trained_on() -> None:
    weight, linear = started()
    first = linear.weight()

    def only_held(make: Callable[[], Batch]) -> Batch:
        batch = make()
        return Batch(batch.run, batch.target, torch.zeros_like(batch.weight), batch.held)

    learn({"linear": linear}, [partial(only_held, make) for make in batches_of(weight, strong_directions())], 5, seed=0)
    assert torch.equal(linear.weight(), first)


def test_a_linear_the_batch_did_not_reach_stays() -> None:
    weight, linear = started()
    idle = started()[1]
    first = idle.weight()
    learn({"linear": linear, "expert": idle}, batches_of(weight, strong_directions()), 20, seed=0)
    assert torch.equal(idle.weight(), first)


def test_tokens_of_huge_norm_weigh_less_and_the_others_alike() -> None:
    target = torch.ones(1, 9, 4)
    target[0, 0] *= 100
    weights = token_norms(target)
    assert float(weights[0, 0]) == pytest.approx(1e-4)
    assert weights[0, 1:].tolist() == [1.0] * 8


@pytest.mark.parametrize("better", [True, False])
def test_the_method_trains_each_block_and_keeps_the_better(
    better: bool,
    checkpoint: Checkpoint,  # noqa: F811
    text: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What training gives is written where the held-out texts say it is better, and nowhere else."""
    real = autoround.learn
    losses: list[float] = []
    trained: list[dict[str, Tensor]] = []

    def judged(linears: dict[str, Linear], *rest: Any) -> tuple[float, float]:
        start = {name: linear.result().codes for name, linear in linears.items()}
        losses.extend(real(linears, *rest))
        end = {name: linear.result().codes for name, linear in linears.items()}
        trained.append(end if better else start)
        assert any(not torch.equal(start[name], end[name]) for name in start)
        return (2.0, 1.0) if better else (1.0, 2.0)

    monkeypatch.setattr(autoround, "learn", judged)
    out = open_checkpoint(optkit.quantize(checkpoint, recipe(text, "autoround"), tmp_path / "out"))
    facts = manifest.read_manifest(out.directory).facts
    assert [block["learned"]["kept"] for block in facts["blocks"].values()] == [better, better]
    assert facts["options"]["steps"] == 60
    assert all(loss > 0 for loss in losses)
    for index, codes in enumerate(trained):
        for name, expected in codes.items():
            assert torch.equal(out.quantized(f"model.layers.{index}.{name}").codes.float(), expected.float())
