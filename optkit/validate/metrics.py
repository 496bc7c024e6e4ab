"""How far two sets of logits are apart: plain functions over arrays, everything in float64.

=================  ==========================================================================================  ==========
metric             formula                                                                                     unit
=================  ==========================================================================================  ==========
KL divergence      ``sum_v p_v (log p_v - log q_v)``, p the reference's next-token distribution, q the          nats
                   candidate's (Kullback & Leibler 1951). Averaged over positions, and its maximum
top-1 agreement    share of positions where both have the same most likely token, near ties counted as same     share
near tie           the reference gives the candidate's choice at most ``near_tie_nats`` less log-probability    nats
                   than its own: a difference no rounding-level comparison can rule on
logit error        ``max_v |q_v - p_v| / (max_v p_v - min_v p_v)`` per position                                 of range
perplexity         ``exp(mean(-log p(next token)))`` over the tokens of real text                               per token
=================  ==========================================================================================  ==========

Tolerances on raw logits raise false alarms (a model whose logits reach 36 differs by 1e-4 between two correct float32
kernels) and argmax alone hides real bugs (a dropped soft cap never changes it). So errors are relative to the logit
range, and distributions are compared, not only choices. Memory: float64 copies of one ``[B, V]`` step at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def log_softmax(logits: npt.ArrayLike) -> FloatArray:
    """``log p`` along the last axis, float64. Logits of ``-inf`` (masked tokens) give ``-inf``."""
    x = np.asarray(logits, dtype=np.float64)  # [..., V]
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def kl_divergence(reference: npt.ArrayLike, candidate: npt.ArrayLike) -> FloatArray:
    """KL(reference || candidate) in nats of each position, ``[..., V] -> [...]``; never below 0.

    A token that the reference gives no mass contributes 0, whatever the candidate says; one that only the candidate
    rules out gives infinity.
    """
    log_p, log_q = log_softmax(reference), log_softmax(candidate)
    p = np.exp(log_p)
    with np.errstate(invalid="ignore"):
        terms = np.where(p > 0, p * (log_p - log_q), 0.0)  # [..., V]
    return np.maximum(terms.sum(axis=-1), 0.0)


def choice_gap(reference: npt.ArrayLike, choice: npt.ArrayLike) -> FloatArray:
    """How much less log-probability (nats) the reference gives ``choice`` ``[...]`` than its best token; 0 if it is that."""
    x = np.asarray(reference, dtype=np.float64)  # [..., V]; the normaliser cancels
    chosen = np.take_along_axis(x, np.asarray(choice, dtype=np.int64)[..., None], axis=-1)[..., 0]
    return x.max(axis=-1) - chosen


def top1_agrees(reference: npt.ArrayLike, candidate: npt.ArrayLike, near_tie_nats: float = 0.0) -> npt.NDArray[np.bool_]:
    """Does the candidate's most likely token lie within ``near_tie_nats`` of the reference's? ``[..., V] -> [...]``"""
    choice = np.argmax(np.asarray(candidate), axis=-1)
    return choice_gap(reference, choice) <= near_tie_nats


def logit_error(reference: npt.ArrayLike, candidate: npt.ArrayLike) -> FloatArray:
    """Largest logit difference of each position over the reference's logit range there, ``[..., V] -> [...]``.

    Masked tokens (``-inf`` on both sides) do not count; ``-inf`` on one side is an infinite error.
    """
    p = np.asarray(reference, dtype=np.float64)
    q = np.asarray(candidate, dtype=np.float64)
    finite = np.isfinite(p)
    with np.errstate(invalid="ignore"):
        difference = np.where(p == q, 0.0, np.abs(q - p))
    span = np.where(finite, p, -np.inf).max(axis=-1) - np.where(finite, p, np.inf).min(axis=-1)
    return difference.max(axis=-1) / np.maximum(span, np.finfo(np.float64).tiny)


def negative_log_likelihood(logits: npt.ArrayLike, targets: npt.ArrayLike) -> FloatArray:
    """``-log p(target)`` in nats, ``[..., V], [...] -> [...]``."""
    picked = np.take_along_axis(log_softmax(logits), np.asarray(targets, dtype=np.int64)[..., None], axis=-1)
    return -picked[..., 0]


def perplexity(nll: npt.ArrayLike) -> float:
    """``exp`` of the mean negative log likelihood (nats per token)."""
    return float(np.exp(np.mean(np.asarray(nll, dtype=np.float64))))


def longest_repeat(tokens: Sequence[int]) -> int:
    """Length of the longest run of one and the same token."""
    longest = run = 0
    previous: int | None = None
    for token in tokens:
        run = run + 1 if token == previous else 1
        longest, previous = max(longest, run), token
    return longest


def summary(values: npt.ArrayLike) -> dict[str, float]:
    """Mean, median, 99th percentile and maximum of ``values`` (flattened)."""
    x = np.asarray(values, dtype=np.float64).reshape(-1)
    return {
        "mean": float(x.mean()),
        "p50": float(np.percentile(x, 50)),
        "p99": float(np.percentile(x, 99)),
        "max": float(x.max()),
    }
