"""Guessing several tokens and checking them in one run.

A decode step of a small batch is bound by reading the weights, so checking k guesses costs little more than one step. The
row's own sampler chooses from the logits of each position in turn, with its own penalties and random numbers, and the first
choice that differs from the guess ends the check. Greedy and sampled tokens are therefore those of plain decoding (up to
rounding between a one-token and a several-token run), and no distribution is approximated.

Sources of guesses:

* :class:`PromptLookup`: what followed the last time the same few tokens appeared (Saxena 2023, "Prompt Lookup Decoding").
  Good when the answer copies: summaries, edits, code.
* :class:`DraftModel`: a smaller or more strongly quantized artifact of the same vocabulary (Leviathan et al. 2023,
  arXiv:2211.17192, with acceptance by equality of the choice).

:class:`Governor` switches guessing off where it does not pay. It books, for every check, what plain steps would have cost
for the same tokens; the sum may only fall ``LOSS_ALLOWED`` of the time spent below zero, plus one step to try at all.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from optkit.errors import UnsupportedError, UsageError
from optkit.runtime.base import Session

Ids = NDArray[np.int64]

LONGEST_KEY, SHORTEST_KEY = 4, 2  # tokens that must match before a guess
LOSS_ALLOWED = 0.01
FRESHNESS = 0.2  # weight of the newest plain step in its average


class Speculator(Protocol):
    """A source of guesses."""

    def propose(self, tokens: Ids, count: int) -> list[int]:
        """Up to ``count`` tokens that may follow ``tokens`` (the row so far); empty for no guess."""
        ...


class PromptLookup:
    """Guesses what followed the last occurrence of the row's last tokens.

    Cost: one dictionary entry per token and key length, added as the row grows.
    """

    def __init__(self) -> None:
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in range(LONGEST_KEY + 1)]  # key -> position of what followed
        self._indexed = 0  # tokens whose predecessors are in the tables

    def propose(self, tokens: Ids, count: int) -> list[int]:
        self._index(tokens)
        for size in range(LONGEST_KEY, SHORTEST_KEY - 1, -1):
            if len(tokens) > size:
                at = self._after[size].get(tuple(tokens[-size:].tolist()))
                if at is not None:
                    guess: list[int] = tokens[at : at + count].tolist()
                    return guess
        return []

    def _index(self, tokens: Ids) -> None:
        start = max(0, self._indexed - LONGEST_KEY)
        recent = tokens[start:].tolist()
        for position in range(max(self._indexed, SHORTEST_KEY), len(tokens)):
            at = position - start
            for size in range(SHORTEST_KEY, min(LONGEST_KEY, position) + 1):
                self._after[size][tuple(recent[at - size : at])] = position
        self._indexed = len(tokens)


class DraftModel:
    """Guesses with another session, greedily.

    Args:
        session: same vocabulary as the target; its cache is used and kept in step by this object.
    """

    def __init__(self, session: Session, target: Session) -> None:
        if session is target:
            raise UsageError("speculative: the draft has to be another session than the one that generates")
        if session.spec.vocab_size != target.spec.vocab_size:
            raise UsageError(
                f"speculative: the draft has {session.spec.vocab_size} tokens and the model {target.spec.vocab_size}: "
                "they need the same vocabulary"
            )
        check_can_speculate(session)
        self._session = session

    def propose(self, tokens: Ids, count: int) -> list[int]:
        session, row = self._session, tokens.tolist()
        count = min(count, session.max_seq_len - len(row))
        if count < 1:
            return []
        cached = session.cached_tokens[0] if session.batch == 1 else []
        common = next(
            (i for i, (a, b) in enumerate(zip(cached, row[:-1], strict=False)) if a != b), min(len(cached), len(row) - 1)
        )
        if common:
            session.truncate([common])
            logits = session.extend([row[common:]])
        else:
            logits = session.prefill([row], capacity=len(row) + count)
        guess = [int(logits[0].argmax())]
        while len(guess) < count:
            guess.append(int(session.decode(np.array(guess[-1:]), copy=False)[0].argmax()))
        return guess


class Governor:
    """Decides whether, and how many tokens, to guess.

    Args:
        longest: guesses at most.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._length = min(2, longest)
        self._plain_s = 0.0  # moving average of a plain step
        self._spent_s = 0.0
        self._saved_s = 0.0

    def count(self) -> int:
        """How many tokens to guess now; 0 for a plain step."""
        if not self._plain_s or self._saved_s < -(LOSS_ALLOWED * self._spent_s + self._plain_s):
            return 0
        return self._length

    def plain(self, seconds: float) -> None:
        """A plain step took ``seconds``."""
        self._plain_s = seconds if not self._plain_s else (1 - FRESHNESS) * self._plain_s + FRESHNESS * seconds
        self._spent_s += seconds

    def checked(self, guessed: int, accepted: int, seconds: float) -> None:
        """``guessed`` tokens were proposed and checked in ``seconds``; ``accepted`` of them were right."""
        self._spent_s += seconds
        self._saved_s += (accepted + 1) * self._plain_s - seconds
        self._length = min(self._longest, 2 * guessed) if accepted == guessed else max(1, min(accepted + 1, self._longest))


def check_can_speculate(session: Session) -> None:
    """Raises UnsupportedError for a session that cannot take tokens back."""
    if session.recurrent:
        raise UnsupportedError(
            "speculative: this model keeps a recurrent state and cannot take back wrong guesses; leave it out"
        )


def make_guesser(target: Session, wish: Any) -> Speculator | None:
    """The source of guesses the option ``speculative`` names: ``prompt_lookup``, a draft session, or any Speculator.

    Raises:
        UsageError: something else, or a draft with another vocabulary.
        UnsupportedError: target or draft cannot take tokens back.
    """
    if wish is None:
        return None
    check_can_speculate(target)
    if wish == "prompt_lookup":
        return PromptLookup()
    if isinstance(wish, Session):
        return DraftModel(wish, target)
    if hasattr(wish, "propose"):
        guesser: Speculator = wish
        return guesser
    raise UsageError(f"speculative {wish!r}: 'prompt_lookup', a session with a draft model, or an object with propose()")
