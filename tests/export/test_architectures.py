"""The sweep finds what is wrong: candidates broken on purpose must be told from right ones. Then the sweep itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests import budgets, tiny
from tests.export import architectures
from tests.export.architectures import Array, Parity, compare, make_rows, reference_logits, rows_for
from tests.tiny_more import MORE


class TorchSession:
    """A session that recomputes each row, alone and unpadded, with a transformers model at every step."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows: list[list[int]] = []

    def reset(self) -> None:
        self.rows = []

    def prefill(self, input_ids: Array, lengths: Array, logits: str = "last") -> Array:
        self.rows = [input_ids[b, :n].tolist() for b, n in enumerate(lengths)]
        full = np.full((*input_ids.shape, tiny.VOCAB), np.nan, np.float32)
        for b, n in enumerate(lengths):
            full[b, :n] = self.forward(b)
        return full if logits == "all" else np.stack([full[b, n - 1] for b, n in enumerate(lengths)])

    def decode(self, token_ids: Array) -> Array:
        for row, token in zip(self.rows, token_ids.tolist(), strict=True):
            row.append(token)
        return np.stack([self.forward(b)[-1] for b in range(len(self.rows))])

    def forward(self, row: int) -> Array:
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([self.rows[row]]), use_cache=False).logits[0].numpy()


class LeakingSession(TorchSession):
    """Keeps the padding of a short row in its past, as a cache written without the true lengths does."""

    def prefill(self, input_ids: Array, lengths: Array, logits: str = "last") -> Array:
        answer = super().prefill(input_ids, lengths, logits)
        self.rows = input_ids.tolist()
        return answer


class CoupledSession(TorchSession):
    """Takes every row's positions from the longest row, as an export that reads one row's offset for all does."""

    def forward(self, row: int) -> Array:
        tokens, shift = self.rows[row], max(map(len, self.rows)) - len(self.rows[row])
        positions = torch.arange(len(tokens)) + shift // 2 * 2
        positions[: len(tokens) // 2] -= shift // 2 * 2
        with torch.no_grad():
            output = self.model(input_ids=torch.tensor([tokens]), position_ids=positions[None], use_cache=False)
        return output.logits[0].numpy()


def judge(name: str, session: Any) -> Parity:
    rows = make_rows()
    return compare(session, reference_logits(tiny.build(name), rows), rows)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "mamba2", "qwen3_next"])
def test_a_right_candidate_passes(name: str) -> None:
    assert judge(name, TorchSession(tiny.build(name))).worst < budgets.EXPORT_RELATIVE_ERROR


@pytest.mark.parametrize("window", [7, 8, 9])
def test_only_the_right_window_passes(window: int) -> None:
    # onnxruntime#25927: a window that leaves out the current token is off by one
    worst = judge("mistral", TorchSession(tiny.build("mistral", sliding_window=window))).worst
    assert worst < budgets.EXPORT_RELATIVE_ERROR if window == tiny.WINDOW else worst > budgets.WRONG_CANDIDATE_ERROR


@pytest.mark.parametrize(
    "change", [{"attn_logit_softcapping": None}, {"final_logit_softcapping": None}, {"attn_logit_softcapping": 2.1}]
)
def test_a_dropped_or_changed_soft_cap_is_found(change: dict[str, Any]) -> None:
    # onnxruntime-genai#692: greedy tokens may still agree, tanh being monotonic, so logits are compared
    assert judge("gemma2", TorchSession(tiny.build("gemma2", **change))).worst > budgets.WRONG_CANDIDATE_ERROR


def test_a_wrong_rope_theta_is_found() -> None:
    # a checkpoint of transformers 5 read by an older library silently falls back to the default theta
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
    assert judge("llama", TorchSession(tiny.build("llama", **rope))).worst > budgets.WRONG_CANDIDATE_ERROR


@pytest.mark.parametrize("name", ["llama_yarn", "llama3_rope", "llama_linear"])
def test_a_dropped_rope_scaling_is_found(name: str) -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    assert judge(name, TorchSession(tiny.build(name, **rope))).worst > budgets.WRONG_CANDIDATE_ERROR


def test_a_rope_switch_that_is_not_taken_is_found() -> None:
    batch = rows_for("phi3_longrope")[-1]
    reference = reference_logits(tiny.build("phi3_longrope"), batch)
    never = tiny.config("phi3_longrope").rope_parameters | {"original_max_position_embeddings": 4096}
    wrong = TorchSession(tiny.build("phi3_longrope", rope_parameters=never, original_max_position_embeddings=4096))
    assert compare(TorchSession(tiny.build("phi3_longrope")), reference, batch).worst < budgets.EXPORT_RELATIVE_ERROR
    found = compare(wrong, reference, batch)
    assert found.prefill > budgets.WRONG_CANDIDATE_ERROR
    assert found.decode > budgets.WRONG_CANDIDATE_ERROR


@pytest.mark.parametrize("name", ["llama", "mamba2", "lfm2"])
def test_padding_that_leaks_into_the_past_is_found(name: str) -> None:
    found = judge(name, LeakingSession(tiny.build(name)))
    assert found.prefill < budgets.EXPORT_RELATIVE_ERROR
    assert found.decode > budgets.WRONG_CANDIDATE_ERROR
    assert found.alone > budgets.WRONG_CANDIDATE_ERROR


def test_a_row_that_depends_on_its_neighbours_is_found() -> None:
    assert judge("llama", CoupledSession(tiny.build("llama"))).alone > budgets.WRONG_CANDIDATE_ERROR


def test_logits_that_are_not_finite_are_an_infinite_error() -> None:
    assert architectures.relative_error(np.arange(6.0).reshape(2, 3), np.full((2, 3), np.nan)) == float("inf")


def test_the_sweep_reports_an_error_and_goes_on() -> None:
    (result,) = architectures.sweep_one("no such architecture")
    assert result.status == "failed"
    assert "no such architecture" in result.message
    assert any("tiny.py" in frame for frame in result.where)


@pytest.mark.parametrize("name", list(tiny.ARCHITECTURES))
def test_every_tiny_model_is_usable(name: str) -> None:
    """Finite logits of useful size, cached equals uncached, and weights that depend on the seed only."""
    model, rows = tiny.build(name), make_rows((9,))
    logits = reference_logits(model, rows)[0]
    assert np.isfinite(logits).all()
    assert 1 < np.abs(logits).max() < 30
    assert len(set(logits.argmax(-1).tolist())) > 5
    assert architectures.self_error(model, rows) < budgets.SELF_ERRORS.get(name, budgets.SELF_ERROR)
    np.testing.assert_array_equal(reference_logits(tiny.build(name), rows)[0], logits)


@pytest.mark.parametrize("name", list(tiny.ARCHITECTURES))
def test_an_exported_model_answers_like_transformers(name: str) -> None:
    """The sweep: shapes other than the sample's, ragged prompts, rows alone, decoding past the window and the rope switch."""
    check_sweep(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MORE))
def test_an_exported_model_of_an_architecture_nobody_prepared_for_answers_like_transformers(name: str) -> None:
    check_sweep(name)


def check_sweep(name: str) -> None:
    for result in architectures.sweep_one(name, architectures.TARGETS):
        assert result.status == "ok", architectures.line_of(result)
        assert result.parity.worst <= budgets.EXPORT_RELATIVE_ERROR
        assert result.evaluator <= budgets.EXPORT_RELATIVE_ERROR
        assert result.facts["within_size"], result.facts
