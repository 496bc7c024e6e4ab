"""From one row's logits to its next token, in numpy.

Order of operations, the one of transformers' ``generate`` (presence and frequency penalties are vLLM's and OpenAI's):

    logits ── logit bias ── repetition ── presence/frequency ── no-repeat n-gram ── bad words ── min_new_tokens
           ── your LogitsProcessors ─┬─ greedy: argmax
                                     └─ temperature ── top-k ── top-p ── min-p ── typical-p ── draw

Definitions, with ``p`` the softmax of what the previous step left:

* top-k keeps the k largest and everything equal to the k-th;
* top-p keeps a token if the mass of the strictly larger ones is below ``top_p`` (Holtzman et al. 2020, arXiv:1904.09751);
* min-p keeps ``p >= min_p * max(p)`` (Nguyen et al. 2024, arXiv:2407.01082);
* typical-p keeps the tokens whose surprise is closest to the entropy, until their mass reaches ``typical_p`` (Meister et
  al. 2022, arXiv:2202.00666).

Tokens with equal scores are kept or dropped together, so no result depends on how a sort breaks ties.

**Cost.** A full sort of a 262k vocabulary takes longer than a decode step of a small model, so none is done: the k largest
are found among those above the k-th largest *block maximum* (a lower bound of the k-th largest value), and top-p and
typical-p look only as far below the best as the mass asks for, and sort those or one bucket of their histogram.

**Draws.** Token ``t`` is the first one, in id order, at which the cumulative probability exceeds ``u``; one ``u`` per token,
from a Philox generator (counter based, the same on every machine) keyed by seed and row. Id order, not score order, makes the
choice insensitive to two scores swapping places by a rounding error: the same seed gives the same tokens on every backend,
except where ``u`` lies within rounding distance of a border.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from optkit.errors import UsageError

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]

LOOKS = (2.0, 5.0, 10.0, np.inf)  # distances (nats) below the best within which top-p and typical-p look, one after the other
SORTED_AT_MOST = 1024  # candidates; more are put into a histogram first
BUCKETS = 1024
BLOCK = 64  # scores per block when searching the k largest
DRAW_BLOCK = 512


class LogitsProcessor(Protocol):
    """A user's hook, called once per row and token after the built-in penalties and before temperature.

    It may edit ``logits`` (float32 ``[V]``, a private copy) in place and return ``None``, or return another array of the same
    shape. ``tokens`` is a read-only int64 view of the row so far, prompt first. ``-inf`` bans a token.
    """

    def __call__(self, row: int, tokens: Ids, logits: Logits) -> Logits | None: ...


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; the defaults change nothing and choose greedily.

    Attributes:
        do_sample: draw from the distribution; otherwise take the largest logit.
        temperature: divides the logits before drawing, > 0.
        top_k: 0 is off.
        top_p, typical_p: 1.0 is off.
        min_p: 0.0 is off.
        repetition_penalty: > 1 makes tokens of the prompt and the answer less likely (Keskar et al. 2019, arXiv:1909.05858).
        presence_penalty, frequency_penalty: subtracted once, or per occurrence, for tokens of the answer.
        no_repeat_ngram_size: no n tokens in a row appear twice; 0 is off.
        logit_bias: token id, or a tuple of ids whose last one is biased after the others, -> number added.
        bad_words: token sequences that never appear.
        min_new_tokens: no end-of-sequence token before that many.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int | tuple[int, ...], float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        checks = (
            (self.temperature > 0, "temperature", "is above 0 (use do_sample=False for the most likely token)"),
            (self.top_k >= 0, "top_k", "is 0 (off) or a number of tokens"),
            (0 < self.top_p <= 1, "top_p", "lies in (0, 1]"),
            (0 <= self.min_p <= 1, "min_p", "lies in [0, 1]"),
            (0 < self.typical_p <= 1, "typical_p", "lies in (0, 1]"),
            (self.repetition_penalty > 0, "repetition_penalty", "is above 0; 1.0 is off"),
            (self.no_repeat_ngram_size >= 0, "no_repeat_ngram_size", "is 0 (off) or a length"),
            (self.min_new_tokens >= 0, "min_new_tokens", "is 0 or a number of tokens"),
        )
        for holds, name, rule in checks:
            if not holds:
                raise UsageError(f"{name} {getattr(self, name)!r}: {name} {rule}")
        if any(not word for word in self.bad_words):
            raise UsageError("bad_words: an empty word would ban every token")

    @property
    def plain(self) -> bool:
        """Nothing changes the logits before the choice."""
        return not (
            self.logit_bias
            or self.bad_words
            or self.no_repeat_ngram_size
            or self.min_new_tokens
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )


class History:
    """The tokens of one row, prompt first, in one buffer that grows by doubling."""

    def __init__(self, prompt: Sequence[int] | Ids) -> None:
        self.prompt_length = len(prompt)
        self._buffer = np.empty(max(64, 2 * len(prompt)), np.int64)
        self._buffer[: len(prompt)] = prompt
        self.length = len(prompt)

    def append(self, token: int) -> None:
        if self.length == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        self._buffer[self.length] = token
        self.length += 1

    @property
    def tokens(self) -> Ids:
        """Every token of the row, as a read-only view."""
        view = self._buffer[: self.length]
        view.flags.writeable = False
        return view

    @property
    def generated(self) -> Ids:
        return self.tokens[self.prompt_length :]


class RowSampler:
    """Chooses one row's tokens, one after the other.

    Args:
        params: how.
        prompt: the row's prompt tokens.
        eos_token_ids: banned until ``min_new_tokens`` is reached.
        seed: two numbers that key the draws.
        row: the row's number, given to the processors.
        processors: user hooks.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int] | Ids,
        eos_token_ids: Sequence[int] = (),
        seed: tuple[int, int] = (0, 0),
        row: int = 0,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.params = params
        self.history = History(prompt)
        self.row = row
        self._eos = np.asarray(sorted(eos_token_ids), np.int64)
        self._processors = tuple(processors)
        self._untouched = params.plain and not self._processors
        self._uniform = _uniforms(seed) if params.do_sample else None
        self._seen = np.unique(self.history.tokens) if params.repetition_penalty != 1.0 else None
        self._counts: dict[int, int] = {}
        self._followers: dict[tuple[int, ...], list[int]] = {}
        banned = [word for word in params.bad_words if not (len(word) == 1 and word[0] in eos_token_ids)]
        self._biases = _by_prefix({**{_as_tuple(k): v for k, v in params.logit_bias.items()}, **dict.fromkeys(banned, -np.inf)})
        if params.no_repeat_ngram_size:
            for end in range(params.no_repeat_ngram_size, self.history.length + 1):
                self._note_ngram(end)

    def next(self, logits: Logits) -> int:
        """Chooses the token after the history from float32 ``logits [V]`` and appends it."""
        token = self.choose(logits)
        self.append(token)
        return token

    def append(self, token: int) -> None:
        """Adds a token that was chosen (or forced) to the history."""
        self.history.append(token)
        if self._untouched:
            return
        if self._seen is not None:
            at = int(np.searchsorted(self._seen, token))
            if at == len(self._seen) or self._seen[at] != token:
                self._seen = np.insert(self._seen, at, token)
        if self.params.presence_penalty or self.params.frequency_penalty:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self.params.no_repeat_ngram_size:
            self._note_ngram(self.history.length)

    def choose(self, logits: Logits) -> int:
        """The token after the history; draws one random number when sampling."""
        scores = logits if self._untouched else self.process(logits)
        if self._uniform is None:
            return int(scores.argmax())
        ids, values = warp(scores, self.params)
        index = draw(values, self._uniform())
        return index if ids is None else int(ids[index])

    def process(self, logits: Logits) -> Logits:
        """``logits`` after everything that precedes temperature, as a new array."""
        params, scores = self.params, np.array(logits, np.float32)
        tokens = self.history.tokens
        _check_vocabulary(self._biases, len(scores))
        add_biases(scores, tokens, {k: [b for b in v if b[2] != -np.inf] for k, v in self._biases.items()})
        if self._seen is not None:
            seen = self._seen[self._seen < len(scores)]
            scores[seen] = penalize_repetition(scores[seen], params.repetition_penalty)
        if self._counts:
            ids = np.fromiter(self._counts, np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(ids))
            scores[ids] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts
        if size := params.no_repeat_ngram_size:
            scores[self._followers.get(tuple(tokens[len(tokens) - size + 1 :].tolist()), [])] = -np.inf
        add_biases(scores, tokens, {k: [b for b in v if b[2] == -np.inf] for k, v in self._biases.items()})
        if self.history.length - self.history.prompt_length < params.min_new_tokens:
            scores[self._eos] = -np.inf
        for processor in self._processors:
            result = processor(self.row, tokens, scores)
            if result is not None:
                if np.shape(result) != scores.shape:
                    raise UsageError(f"logits processor {processor!r} returned shape {np.shape(result)}; [V] is {scores.shape}")
                scores = np.asarray(result, np.float32)
        if scores.max() == -np.inf:
            raise UsageError(
                f"row {self.row}: every token is banned (bad words, biases or a logits processor); allow at least one"
            )
        return scores

    def _note_ngram(self, end: int) -> None:
        ngram = self.history.tokens[end - self.params.no_repeat_ngram_size : end].tolist()
        if len(ngram) == self.params.no_repeat_ngram_size:
            self._followers.setdefault(tuple(ngram[:-1]), []).append(ngram[-1])


def _uniforms(key: tuple[int, int]) -> Callable[[], float]:
    """Numbers in [0, 1), the sequence that belongs to ``key``."""
    return np.random.Generator(np.random.Philox(key=[part & (2**64 - 1) for part in key])).random


# ── before temperature ────────────────────────────────────────────────────────────────────────────────────────────────

Bias = tuple[tuple[int, ...], int, float]  # prefix, token, number added


def _as_tuple(key: int | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(key) if isinstance(key, tuple | list) else (int(key),)


def _by_prefix(biases: Mapping[tuple[int, ...], float]) -> dict[int, list[Bias]]:
    """Biases grouped by the length of the prefix that triggers them."""
    groups: dict[int, list[Bias]] = {}
    for sequence, value in biases.items():
        groups.setdefault(len(sequence) - 1, []).append((sequence[:-1], sequence[-1], float(value)))
    return groups


def _check_vocabulary(biases: Mapping[int, list[Bias]], vocab_size: int) -> None:
    worst = max((token for group in biases.values() for _, token, _ in group), default=0)
    if worst >= vocab_size:
        raise UsageError(f"logit_bias or bad_words name token {worst}; the vocabulary has {vocab_size}")


def add_biases(scores: Logits, tokens: Ids, biases: Mapping[int, list[Bias]]) -> None:
    """Adds each bias whose prefix ends ``tokens`` to its token's score, in place."""
    for length, group in biases.items():
        if length <= len(tokens):
            tail = tuple(tokens[len(tokens) - length :].tolist()) if length else ()
            for prefix, token, value in group:
                if prefix == tail:
                    scores[token] += np.float32(value)


def penalize_repetition(scores: Logits, penalty: float) -> Logits:
    """Divides positive scores by ``penalty`` and multiplies negative ones."""
    return np.where(scores < 0, scores * np.float32(penalty), scores / np.float32(penalty))


# ── temperature and after: a candidate set is (ids in ascending order, or None for all; their scores) ──────────────────

Candidates = tuple[Ids | None, Logits]


def warp(scores: Logits, params: SamplingParams) -> Candidates:
    """Temperature and the filters, in order; the softmax of what is left is the distribution to draw from."""
    if params.temperature != 1.0:
        scores = scores / np.float32(params.temperature)
    candidates: Candidates = (None, scores)
    if params.top_k:
        candidates = top_k(candidates, params.top_k)
    if params.top_p < 1.0:
        candidates = top_p(candidates, params.top_p)
    if params.min_p > 0.0:
        candidates = min_p(candidates, params.min_p)
    if params.typical_p < 1.0:
        candidates = typical_p(candidates, params.typical_p)
    return candidates


def filtered(scores: Logits, params: SamplingParams) -> Logits:
    """:func:`warp` as transformers shows it: the whole ``[V]``, with ``-inf`` where a token was dropped."""
    ids, values = warp(scores, params)
    if ids is None:
        return values
    result = np.full_like(scores, -np.inf)
    result[ids] = values
    return result


def _keep(candidates: Candidates, kept: Ids) -> Candidates:
    ids, values = candidates
    return (kept if ids is None else ids[kept]), values[kept]


def kth_largest(values: Logits, k: int) -> np.float32:
    """The k-th largest value (1-based) without sorting: the k-th largest block maximum is a lower bound of it."""
    blocks = len(values) // BLOCK
    if k < blocks:
        maxima = values[: blocks * BLOCK].reshape(blocks, BLOCK).max(axis=1)
        values = values[values >= np.partition(maxima, blocks - k)[blocks - k]]
    return np.partition(values, len(values) - k)[len(values) - k]


def top_k(candidates: Candidates, k: int) -> Candidates:
    values = candidates[1]
    if k >= len(values):
        return candidates
    return _keep(candidates, np.flatnonzero(values >= kth_largest(values, k)))


def _cut(keys: Logits, weights: Logits, target: float) -> np.float32:
    """The key at which the weights, added in ascending order of their keys (>= 0), reach ``target``.

    Looks at small keys first, takes more until they have the mass, then sorts them, or one bucket of their histogram.
    """
    for bound in LOOKS:
        near = np.flatnonzero(keys <= bound)
        chosen, masses = keys[near], weights[near]
        if bound == np.inf or masses.sum() > target:
            break
    before = 0.0
    if len(chosen) > SORTED_AT_MOST:
        top = min(bound, float(chosen.max(where=chosen < np.inf, initial=0.0))) + 1e-6
        buckets = np.minimum(chosen * np.float32(BUCKETS / top), np.float32(BUCKETS)).astype(np.intp)
        cumulative = np.cumsum(np.bincount(buckets, masses))
        bucket = min(int(np.searchsorted(cumulative, target)), len(cumulative) - 1)
        before = float(cumulative[bucket - 1]) if bucket else 0.0
        inside = np.flatnonzero(buckets == bucket)
        chosen, masses = chosen[inside], masses[inside]
    order = np.argsort(chosen, kind="stable")
    reached = np.cumsum(masses[order], dtype=np.float64)
    return chosen[order[min(int(np.count_nonzero(reached < target - before)), len(order) - 1)]]


def top_p(candidates: Candidates, mass: float) -> Candidates:
    keys = candidates[1].max() - candidates[1]
    weights = np.exp(-keys)
    return _keep(candidates, np.flatnonzero(keys <= _cut(keys, weights, mass * float(weights.sum()))))


def min_p(candidates: Candidates, fraction: float) -> Candidates:
    values = candidates[1]
    return _keep(candidates, np.flatnonzero(values >= values.max() + np.float32(np.log(fraction))))


def typical_p(candidates: Candidates, mass: float) -> Candidates:
    candidates = _keep(candidates, np.flatnonzero(candidates[1] > -np.inf))
    logp = log_softmax(candidates[1])
    probabilities = np.exp(logp)
    distance = np.abs(-logp - -np.float32(np.dot(logp, probabilities)))
    return _keep(candidates, np.flatnonzero(distance <= _cut(distance, probabilities, mass)))


def draw(scores: Logits, uniform: float) -> int:
    """The first index at which the cumulative softmax of ``scores`` exceeds ``uniform`` in [0, 1).

    Only one block of a large vocabulary is accumulated element by element; the blocks' sums are.
    """
    weights = np.exp(scores - scores.max())
    blocks = -(-len(weights) // DRAW_BLOCK)
    padded = np.pad(weights, (0, blocks * DRAW_BLOCK - len(weights)))
    cumulative = np.cumsum(padded.reshape(blocks, DRAW_BLOCK).sum(axis=1), dtype=np.float64)
    target = uniform * cumulative[-1]
    block = int(np.searchsorted(cumulative, target, side="right"))
    start = block * DRAW_BLOCK
    inside = np.cumsum(weights[start : start + DRAW_BLOCK], dtype=np.float64)
    index = int(np.searchsorted(inside, target - (cumulative[block - 1] if block else 0.0), side="right"))
    if index == len(inside):  # rounding, at the end of a block: its last token that has any probability
        index = int(np.flatnonzero(weights[start : start + DRAW_BLOCK])[-1])
    return start + index


# ── log-probabilities ─────────────────────────────────────────────────────────────────────────────────────────────────


def log_sum_exp(logits: Logits) -> float:
    largest = logits.max()
    return float(largest) + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))


def log_softmax(logits: Logits) -> Logits:
    return logits - np.float32(log_sum_exp(logits))


def top_logprobs(logits: Logits, count: int) -> list[tuple[int, float]]:
    """The ``count`` most likely tokens with their natural-log probabilities, best first; ties by id."""
    ids, values = top_k((None, logits), min(count, len(logits)))
    ids = np.arange(len(logits)) if ids is None else ids
    order = np.argsort(-values, kind="stable")[:count]
    total = log_sum_exp(logits)
    return [(int(ids[i]), float(values[i]) - total) for i in order]
