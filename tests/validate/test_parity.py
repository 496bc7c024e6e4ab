"""The lockstep comparison on sessions without an engine: what it feeds, and that it tells broken candidates apart."""

import numpy as np
import pytest

from optkit.errors import UsageError
from optkit.validate import parity
from optkit.validate.cases import make_cases
from tests.validate.fake import FakeSession

TOKENS = np.random.default_rng(0).integers(0, 32, 4000)


def ragged(steps=12):
    return make_cases(TOKENS, rows=3, prompt_tokens=9, decode_steps=steps)[1]


def test_a_model_beside_itself_differs_by_nothing():
    result = parity.compare_case(FakeSession(), FakeSession(), ragged(), 0.0)
    assert result.kl.shape == (3, 13)
    assert (result.kl == 0).all()
    assert (result.error == 0).all()
    assert result.agrees.all()
    assert result.finite.all()


def test_both_sides_are_fed_the_same_legal_prompt_and_continuation():
    """optimum#978 and the all-ones past of another checker: inputs one side would never see void a comparison."""
    reference, candidate, case = FakeSession(), FakeSession(noise=0.5), ragged(5)
    parity.compare_case(reference, candidate, case, 0.0)
    assert reference.calls == candidate.calls
    assert [name for name, _ in reference.calls] == ["reset", "prefill", *["decode"] * 5]
    assert [row[-5:] for row in reference.rows] == case.continuation.tolist()


@pytest.mark.parametrize("step", [0, 4, 12])
def test_a_difference_at_one_step_is_found_at_that_step(step):
    def flaw(logits, length):
        return logits + (length == ragged().lengths[0] + step) * np.linspace(0, 3, logits.shape[1])

    result = parity.compare_case(FakeSession(), FakeSession(flaw=flaw), ragged(), 0.0)
    assert np.flatnonzero(result.kl[0] > 1e-6).tolist() == [step]


def test_a_coupled_row_is_found():
    """transformers#22707, optimum#877: a row whose answer depends on its neighbours."""
    result = parity.compare_case(FakeSession(), FakeSession(flaw=lambda x, _: x + 0.3 * x[::-1]), ragged(), 0.0)
    assert result.error.max() > 0.05


def test_nan_and_infinity_are_marked_where_they_are():
    def flaw(logits, length):
        logits[1] = np.nan if length % 2 else np.inf
        return logits

    with np.errstate(invalid="ignore"):
        result = parity.compare_case(FakeSession(), FakeSession(flaw=flaw), ragged(), 0.0)
    assert not result.finite[1].any()
    assert result.finite[[0, 2]].all()


def test_another_vocabulary_is_refused():
    with pytest.raises(UsageError, match=r"\[3, 32\].*\[3, 40\].*not the same model"):
        parity.compare_case(FakeSession(), FakeSession(vocab=40), ragged(), 0.0)


def test_greedy_tokens_of_a_model_match_its_own_and_are_what_it_would_generate():
    prompt = TOKENS[:7]
    result = parity.compare_greedy(FakeSession(), FakeSession(), prompt, 20, 0.0)
    assert (result.matched, result.near_ties, result.steps) == (20, 0, 20)
    assert result.reference == parity.generate_greedy(FakeSession(), prompt, 20)


def test_greedy_matching_ends_at_the_first_difference_that_is_not_a_near_tie():
    start = 7

    def flaw(logits, length):
        if length == start + 5:
            logits[:, np.argmin(logits)] = logits.max() + 1.0
        return logits

    result = parity.compare_greedy(FakeSession(), FakeSession(flaw=flaw), TOKENS[:start], 20, 0.05)
    assert result.matched == 5
    assert result.reference[:5] == result.candidate[:5]
    assert result.reference[5] != result.candidate[5]


def test_a_near_tie_is_counted_and_does_not_end_the_match():
    def tie(logits, length):
        order = np.argsort(logits[0])
        if length == 7 + 3:
            logits[0, order[-2]] = logits[0, order[-1]] - 0.01
        return logits

    def other_way(logits, length):
        logits = tie(logits, length)
        if length == 7 + 3:
            order = np.argsort(logits[0])
            logits[0, order[-2]] += 0.02
        return logits

    result = parity.compare_greedy(FakeSession(flaw=tie), FakeSession(flaw=other_way), TOKENS[:7], 10, 0.05)
    assert (result.matched, result.near_ties) == (10, 1)


def test_n_greedy_tokens_cost_one_prefill_and_n_minus_1_decodes():
    session = FakeSession()
    assert len(parity.generate_greedy(session, TOKENS[:4], 6)) == 6
    assert [name for name, _ in session.calls] == ["reset", "prefill", *["decode"] * 5]
