"""The metrics against formulas written out for one position, and at the edges."""

import math

import numpy as np
import pytest

from optkit.validate import metrics

RNG = np.random.default_rng(0)


def softmax(row):
    shifted = [math.exp(x - max(row)) for x in row]
    return [x / sum(shifted) for x in shifted]


def test_kl_is_the_sum_written_out():
    p, q = RNG.normal(size=7) * 3, RNG.normal(size=7) * 3
    expected = sum(a * math.log(a / b) for a, b in zip(softmax(p), softmax(q), strict=True))
    assert metrics.kl_divergence(p, q) == pytest.approx(expected, rel=1e-12)


def test_kl_of_equal_distributions_is_zero_and_not_negative():
    p = RNG.normal(size=(5, 1000)).astype(np.float32)
    assert (metrics.kl_divergence(p, p) == 0).all()
    assert (metrics.kl_divergence(p, p + 3.0) >= 0).all()  # a shift of all logits changes nothing
    assert metrics.kl_divergence(p, p + 3.0).max() < 1e-12


def test_kl_looks_from_the_reference():
    p, q = np.array([0.0, 0.0]), np.array([0.0, -5.0])
    assert metrics.kl_divergence(p, q) != pytest.approx(metrics.kl_divergence(q, p))


def test_kl_ignores_tokens_the_reference_masks_and_is_infinite_where_only_the_candidate_does():
    masked = np.array([1.0, 2.0, -np.inf])
    assert np.isfinite(metrics.kl_divergence(masked, np.array([1.0, 2.0, 0.0])))
    assert metrics.kl_divergence(np.array([1.0, 2.0, 0.0]), masked) == np.inf


def test_small_divergences_survive_because_sums_are_float64():
    p = RNG.normal(size=50_000).astype(np.float32)
    q = p + (1e-4 * RNG.normal(size=50_000)).astype(np.float32)
    assert 1e-9 < metrics.kl_divergence(p, q) < 1e-8  # half the variance of the difference: 5e-9


def test_a_near_tie_counts_as_the_same_choice_and_a_clear_difference_does_not():
    reference = np.array([2.00, 1.98, 0.0])
    candidate = np.array([1.98, 2.00, 0.0])
    assert not metrics.top1_agrees(reference, candidate)
    assert metrics.top1_agrees(reference, candidate, near_tie_nats=0.05)
    assert not metrics.top1_agrees(np.array([2.0, 1.0, 0.0]), candidate, near_tie_nats=0.05)


def test_choice_gap_is_the_difference_of_log_probabilities():
    logits = RNG.normal(size=(4, 9))
    log_p = metrics.log_softmax(logits)
    choice = np.array([0, 3, 8, int(logits[3].argmax())])
    gap = metrics.choice_gap(logits, choice)
    np.testing.assert_allclose(gap, log_p.max(-1) - log_p[np.arange(4), choice], atol=1e-12)
    assert gap[3] == 0.0


def test_logit_error_is_relative_to_the_range_of_the_reference():
    """optimum#449, #607, #635, #1334: an absolute 1e-5 calls a correct export of a model with large logits wrong."""
    p = np.array([0.0, 36.0])
    assert metrics.logit_error(p, np.array([0.0, 36.0 + 1.2e-4])) == pytest.approx(1.2e-4 / 36.0)
    assert metrics.logit_error(p * 100, p * 100 + np.array([0.0, 1.2e-2])) == pytest.approx(1.2e-4 / 36.0)


def test_a_dropped_soft_cap_shows_though_the_argmax_stays():
    """onnxruntime-genai#692, vllm-metal#665: tanh is monotonic, so greedy tokens match without it."""
    raw = RNG.normal(size=(16, 64)) * 8
    capped = 5.0 * np.tanh(raw / 5.0)
    assert metrics.top1_agrees(capped, raw).all()
    assert metrics.logit_error(capped, raw).min() > 0.1
    assert metrics.kl_divergence(capped, raw).min() > 0.05


def test_masked_tokens_do_not_count_as_logit_errors_unless_one_side_forgets_them():
    masked = np.array([1.0, 3.0, -np.inf])
    assert metrics.logit_error(masked, masked) == 0.0
    assert metrics.logit_error(masked, np.array([1.0, 3.0, 0.0])) == np.inf


def test_perplexity_of_uniform_logits_is_the_vocabulary_size():
    nll = metrics.negative_log_likelihood(np.zeros((10, 37)), np.arange(10))
    assert metrics.perplexity(nll) == pytest.approx(37.0)


@pytest.mark.parametrize(("tokens", "longest"), [([], 0), ([5], 1), ([1, 1, 2, 2, 2, 1], 3), ([4] * 9, 9)])
def test_longest_repeat_counts_runs(tokens, longest):
    assert metrics.longest_repeat(tokens) == longest
