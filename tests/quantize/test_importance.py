"""Token weights: the streamed backward pass against one through the whole model."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optkit.checkpoint.model import linears, open_checkpoint
from optkit.quantize import importance
from optkit.quantize.capture import BlockModel
from optkit.quantize.importance import CAP, shared_weights, token_weights
from tests import tiny

SEED = 4


def whole_model_norms(directory: Path, tokens: Tensor) -> dict[str, Tensor]:
    """``linear -> |∂ℓ/∂y_t|²`` ``[N, S]`` by a backward pass for each text, with the same drawn tokens."""
    model = open_checkpoint(directory).load()
    generator = torch.Generator().manual_seed(SEED)
    norms: dict[str, list[Tensor]] = {name: [] for name in linears(model)}
    for row in tokens:
        outputs: dict[str, Tensor] = {}
        handles = [
            model.get_submodule(name).register_forward_hook(
                lambda m, a, out, name=name, outputs=outputs: outputs.update({name: out})
            )
            for name in norms
        ]
        with torch.enable_grad():
            model.get_input_embeddings().register_forward_hook(lambda m, a, out: out.requires_grad_(True))
            logits = model(input_ids=row[None], use_cache=False).logits[0]
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator).squeeze(-1)
            loss = nn.functional.cross_entropy(logits, drawn, reduction="sum")
            gradients = torch.autograd.grad(loss, [outputs[name] for name in norms])
        for name, gradient in zip(norms, gradients, strict=True):
            norms[name].append(gradient[0].square().sum(-1))
        for handle in handles:
            handle.remove()
    return {name: torch.stack(parts) for name, parts in norms.items()}


def test_the_streamed_weights_are_those_of_one_backward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance, "precision", contextlib.nullcontext)
    directory = tiny.save("llama", tmp_path / "model")
    tokens = torch.randint(3, tiny.VOCAB, (3, 14), generator=torch.Generator().manual_seed(1))
    source = open_checkpoint(directory)
    model = BlockModel(source, list(linears(source.skeleton())), tokens, tmp_path)
    model.rows = [slice(0, 2), slice(2, 3)]
    with torch.no_grad():
        model.load_outside()
        model.note_calls()
    found = token_weights(
        model, lambda index, block: [[name] for name in model.linears[index]], 2, tmp_path, lambda *_: None, SEED
    )
    norms = whole_model_norms(directory, tokens)
    for index, block in enumerate(model.names):
        for name in model.linears[index]:
            expected = norms[f"{block}.{name}"]
            expected = (expected / expected.mean()).clamp(max=CAP)
            torch.testing.assert_close(found[index][name], expected / expected.mean(), rtol=1e-3, atol=1e-4)
    assert not list(tmp_path.glob("input-*"))


def test_linears_of_a_group_share_a_weight_of_mean_one_and_outliers_are_capped() -> None:
    norms = {"a": torch.rand(2, 50) + 0.1, "b": torch.rand(2, 50) + 0.1, "c": torch.ones(2, 50)}
    norms["c"][0, 0] = 1e6
    found = shared_weights(norms, [["a", "b"], ["c"], ["missing"]])
    assert torch.equal(found["a"], found["b"])
    assert "missing" not in found
    for weight in found.values():
        assert float(weight.mean()) == pytest.approx(1.0, rel=1e-4)
    capped = found["c"]
    assert float(capped.max()) > 1
    assert float(capped.max() / capped.sum()) == pytest.approx(
        CAP / (CAP + float((norms["c"] / norms["c"].mean())[0, 1]) * 99), rel=1e-3
    )
