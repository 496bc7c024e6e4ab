"""The oracle is transformers' own processors, on logits: which tokens survive, and their scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from optkit.errors import UsageError
from optkit.runtime import sampling
from optkit.runtime.sampling import RowSampler, SamplingParams, draw, filtered, top_logprobs

VOCABULARIES = (97, 5000, 49152)
PROMPT = [5, 6, 7, 5, 6, 9, 5]


def logits_of(vocab: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)


def theirs(processor, logits: np.ndarray, tokens: list[int] = PROMPT) -> np.ndarray:
    return processor(torch.tensor([tokens]), torch.from_numpy(logits.copy())[None])[0].numpy()


def assert_same(ours: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(want))
    np.testing.assert_allclose(ours[np.isfinite(ours)], want[np.isfinite(want)], rtol=1e-6)


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize(
    ("processor", "params"),
    [
        (lambda: hf.TemperatureLogitsWarper(0.6), {"temperature": 0.6}),
        (lambda: hf.TopKLogitsWarper(1), {"top_k": 1}),
        (lambda: hf.TopKLogitsWarper(50), {"top_k": 50}),
        (lambda: hf.TopKLogitsWarper(10**6), {"top_k": 10**6}),
        (lambda: hf.TopPLogitsWarper(0.3), {"top_p": 0.3}),
        (lambda: hf.TopPLogitsWarper(0.9), {"top_p": 0.9}),
        (lambda: hf.TopPLogitsWarper(1e-6), {"top_p": 1e-6}),
        (lambda: hf.MinPLogitsWarper(0.07), {"min_p": 0.07}),
        (lambda: hf.TypicalLogitsWarper(0.2), {"typical_p": 0.2}),
        (lambda: hf.TypicalLogitsWarper(0.9), {"typical_p": 0.9}),
    ],
)
def test_each_filter_keeps_what_transformers_keeps(vocab, spread, processor, params) -> None:
    logits = logits_of(vocab, spread=spread)
    ours, want = filtered(logits, SamplingParams(do_sample=True, **params)), theirs(processor(), logits)
    # torch adds float32 probabilities: tokens within its rounding of the border may fall on either side
    border = np.flatnonzero(np.isneginf(ours) != np.isneginf(want))
    assert len(border) <= max(2, vocab // 2000)
    ours[border] = want[border] = 0.0
    assert_same(ours, want)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_all_filters_together_follow_transformers_order(vocab) -> None:
    logits = logits_of(vocab)
    chain = hf.LogitsProcessorList(
        [hf.TemperatureLogitsWarper(0.8), hf.TopKLogitsWarper(40), hf.TopPLogitsWarper(0.9), hf.MinPLogitsWarper(0.02)]
    )
    params = SamplingParams(do_sample=True, temperature=0.8, top_k=40, top_p=0.9, min_p=0.02)
    assert_same(filtered(logits, params), theirs(chain, logits))


@pytest.mark.parametrize(
    ("processor", "params"),
    [
        (lambda: hf.RepetitionPenaltyLogitsProcessor(1.3), {"repetition_penalty": 1.3}),
        (lambda: hf.NoRepeatNGramLogitsProcessor(2), {"no_repeat_ngram_size": 2}),
        (lambda: hf.NoRepeatNGramLogitsProcessor(3), {"no_repeat_ngram_size": 3}),
        (lambda: hf.NoRepeatNGramLogitsProcessor(1), {"no_repeat_ngram_size": 1}),
        (lambda: hf.NoBadWordsLogitsProcessor([[5, 8], [11], [6, 9, 5, 3]], 2), {"bad_words": ((5, 8), (11,), (6, 9, 5, 3))}),
        (
            lambda: hf.SequenceBiasLogitsProcessor({(4,): 2.5, (9, 5, 20): -3.0, (8, 5, 21): 9.0}),
            {"logit_bias": {4: 2.5, (9, 5, 20): -3.0, (8, 5, 21): 9.0}},
        ),
        (lambda: hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, 2), {"min_new_tokens": 4}),
        (lambda: hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, 2), {"min_new_tokens": 3}),
    ],
)
def test_each_penalty_equals_transformers_on_prompt_and_answer(processor, params) -> None:
    logits = logits_of(97)
    sampler = RowSampler(SamplingParams(**params), PROMPT, eos_token_ids=[2])
    answer = [5, 6, 5]
    for token in answer:
        sampler.append(token)
    assert_same(sampler.process(logits), theirs(processor(), logits, PROMPT + answer))


def test_penalties_are_applied_in_transformers_order() -> None:
    logits = logits_of(97)
    chain = hf.LogitsProcessorList(
        [
            hf.SequenceBiasLogitsProcessor({(5,): 4.0}),
            hf.RepetitionPenaltyLogitsProcessor(1.5),
            hf.NoRepeatNGramLogitsProcessor(2),
            hf.NoBadWordsLogitsProcessor([[7]], 2),
            hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 1, 2),
        ]
    )
    params = SamplingParams(
        logit_bias={5: 4.0}, repetition_penalty=1.5, no_repeat_ngram_size=2, bad_words=((7,),), min_new_tokens=1
    )
    assert_same(RowSampler(params, PROMPT, [2]).process(logits), theirs(chain, logits))


def test_presence_and_frequency_penalties_count_the_answer_only() -> None:
    logits = np.zeros(16, np.float32)
    sampler = RowSampler(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), [1, 1, 1])
    for token in (3, 3, 4):
        sampler.append(token)
    want = np.zeros(16, np.float32)
    want[3], want[4] = -0.5 - 2 * 0.25, -0.5 - 0.25
    np.testing.assert_array_equal(sampler.process(logits), want)


def test_the_engine_s_buffer_is_never_written() -> None:
    logits = logits_of(97)
    before = logits.copy()
    params = SamplingParams(do_sample=True, repetition_penalty=2.0, bad_words=((3,),), temperature=0.5, top_k=3)
    RowSampler(params, PROMPT, processors=[lambda row, tokens, scores: scores.fill(1)]).next(logits)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("params", [{}, {"top_p": 0.7}, {"top_k": 5, "temperature": 1.7}, {"typical_p": 0.5}, {"min_p": 0.1}])
def test_draws_follow_the_filtered_distribution(params) -> None:
    logits = logits_of(40, spread=1.0)
    sampler_params = SamplingParams(do_sample=True, **params)
    kept = filtered(logits, sampler_params).astype(np.float64)
    want = np.exp(kept - kept.max())
    want /= want.sum()
    draws = 20_000
    sampler = RowSampler(sampler_params, [1], seed=(7, 0))
    counts = np.bincount([sampler.choose(logits) for _ in range(draws)], minlength=40)
    assert counts[want == 0].sum() == 0
    live = want > 0
    chi_square = ((counts - draws * want)[live] ** 2 / (draws * want[live])).sum()
    degrees = live.sum() - 1
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees) + 1  # 5 standard deviations of a chi-square


def test_a_draw_is_the_first_id_whose_cumulative_probability_exceeds_u() -> None:
    for vocab in (1, 511, 512, 513, 1300):
        scores = logits_of(vocab, seed=vocab)
        probabilities = np.exp(scores.astype(np.float64) - scores.max())
        cumulative = np.cumsum(probabilities / probabilities.sum())
        for u in np.random.default_rng(1).random(200):
            index = draw(scores, u)
            assert cumulative[index] > u - 1e-6
            assert index == 0 or cumulative[index - 1] <= u + 1e-6
        assert draw(scores, np.nextafter(1.0, 0.0)) < vocab


def test_impossible_tokens_are_never_drawn_even_at_the_borders_of_u() -> None:
    scores = np.full(1100, -np.inf, np.float32)
    scores[[3, 600]] = 0.0
    assert draw(scores, 0.0) == 3
    assert draw(scores, np.nextafter(0.5, 0.0)) == 3
    assert draw(scores, 0.5) == 600
    assert draw(scores, np.nextafter(1.0, 0.0)) == 600


def test_a_rounding_error_in_the_logits_does_not_change_the_draws() -> None:
    logits = logits_of(5000, spread=2.0)
    noisy = logits * np.float32(1 + 1e-6)
    params = SamplingParams(do_sample=True, temperature=0.9, top_p=0.95)
    a, b = RowSampler(params, [1], seed=(3, 0)), RowSampler(params, [1], seed=(3, 0))
    assert [a.next(logits) for _ in range(200)] == [b.next(noisy) for _ in range(200)]


def test_seed_and_row_decide_the_draws() -> None:
    logits = logits_of(1000, spread=1.0)

    def tokens(seed: int, row: int) -> list[int]:
        sampler = RowSampler(SamplingParams(do_sample=True), [1], seed=(seed, row))
        return [sampler.next(logits) for _ in range(20)]

    assert tokens(1, 0) == tokens(1, 0)
    assert tokens(1, 0) != tokens(1, 1)
    assert tokens(1, 0) != tokens(2, 0)


def test_equal_scores_are_kept_or_dropped_together() -> None:
    scores = np.array([1, 3, 3, 3, 0, 2], np.float32)
    assert np.isfinite(filtered(scores, SamplingParams(do_sample=True, top_k=2))).tolist() == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]
    kept = np.isfinite(filtered(scores, SamplingParams(do_sample=True, top_p=0.1)))
    assert kept.tolist() == [False, True, True, True, False, False]


def test_kth_largest_agrees_with_sorting() -> None:
    rng = np.random.default_rng(2)
    for size in (1, 63, 64, 65, 1000, 8192):
        values = rng.standard_normal(size).astype(np.float32)
        for k in {1, 2, size // 2 + 1, size}:
            if k <= size:
                assert sampling.kth_largest(values, k) == np.sort(values)[-k]


def test_a_processor_sees_its_row_and_the_tokens_so_far() -> None:
    seen = []

    def only_even(row: int, tokens: np.ndarray, logits: np.ndarray) -> None:
        seen.append((row, tokens.tolist()))
        logits[1::2] = -np.inf

    sampler = RowSampler(SamplingParams(), [1, 2], row=3, processors=[only_even])
    logits = np.arange(10, dtype=np.float32)
    assert [sampler.next(logits), sampler.next(logits)] == [8, 8]
    assert seen == [(3, [1, 2]), (3, [1, 2, 8])]


def test_a_processor_may_return_a_new_array_but_not_another_shape() -> None:
    one_hot = np.full(10, -np.inf, np.float32)
    one_hot[4] = 0
    assert RowSampler(SamplingParams(), [1], processors=[lambda *_: one_hot]).next(np.zeros(10, np.float32)) == 4
    with pytest.raises(UsageError, match="shape"):
        RowSampler(SamplingParams(), [1], processors=[lambda *_: one_hot[:3]]).next(np.zeros(10, np.float32))


def test_banning_everything_is_an_error_and_not_a_random_token() -> None:
    with pytest.raises(UsageError, match="every token"):
        RowSampler(SamplingParams(), [1], processors=[lambda r, t, s: s.fill(-np.inf)]).next(np.zeros(4, np.float32))


def test_biases_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(UsageError, match="token 10; the vocabulary has 10"):
        RowSampler(SamplingParams(logit_bias={10: 1.0}), [1]).next(np.zeros(10, np.float32))


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": 0}, {"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": 2}, {"typical_p": 0},
     {"repetition_penalty": 0}, {"no_repeat_ngram_size": -1}, {"min_new_tokens": -2}, {"bad_words": ((),)}],
)  # fmt: skip
def test_impossible_parameters_are_refused_by_name(wrong) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_top_logprobs_are_those_of_the_softmax() -> None:
    logits = logits_of(3000)
    want = torch.log_softmax(torch.from_numpy(logits).double(), -1).topk(5)
    ids, values = zip(*top_logprobs(logits, 5), strict=True)
    assert list(ids) == want.indices.tolist()
    np.testing.assert_allclose(values, want.values.numpy(), atol=1e-5)
