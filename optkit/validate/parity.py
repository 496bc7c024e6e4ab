"""Runs two sessions side by side, step by step, and keeps the numbers of each position.

Both sessions get the same prompt, the same continuation and keep their own cache; only one step's logits ``[B, V]`` of each
side are in memory at a time, so a vocabulary of 262,144 costs megabytes and not gigabytes. Nothing here knows an engine:
the reference is just another session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from optkit.errors import UsageError
from optkit.validate import metrics
from optkit.validate.cases import Case, IntArray

FloatArray = npt.NDArray[np.float64]
Tick = Callable[[str], None]


class Stepper(Protocol):
    """The part of a session that validation needs."""

    def reset(self) -> None: ...

    def prefill(self, input_ids: IntArray, lengths: IntArray) -> npt.NDArray[Any]: ...

    def decode(self, token_ids: IntArray) -> npt.NDArray[Any]: ...


@dataclass
class CaseResult:
    """What one case measured; every array is ``[B, N + 1]``: the prompt's last token, then each decode step."""

    case: Case
    kl: FloatArray
    agrees: npt.NDArray[np.bool_]
    same_choice: npt.NDArray[np.bool_]
    error: FloatArray
    finite: npt.NDArray[np.bool_]


@dataclass
class GreedyResult:
    """One prompt continued by the reference's own greedy choices, with the candidate following.

    Attributes:
        reference: the reference's tokens.
        candidate: what the candidate chose at each step after the same past.
        matched: steps before the first difference that is not a near tie.
        near_ties: differences among them that were.
    """

    reference: list[int] = field(default_factory=list)
    candidate: list[int] = field(default_factory=list)
    matched: int = 0
    near_ties: int = 0

    @property
    def steps(self) -> int:
        return len(self.reference)


def silent(_: str) -> None:
    """The progress callback that says nothing."""


def steps_of(session: Stepper, case: Case) -> Iterator[npt.NDArray[Any]]:
    """Logits ``[B, V]`` after the prompt and after each token of the continuation."""
    session.reset()
    yield session.prefill(case.input_ids, case.lengths)
    for step in range(case.steps):
        yield session.decode(case.continuation[:, step])


def compare_case(reference: Stepper, candidate: Stepper, case: Case, near_tie_nats: float, tick: Tick = silent) -> CaseResult:
    """Both sides on one case.

    Raises:
        UsageError: the two have different vocabularies, so they are not the same model.
    """
    columns: dict[str, list[npt.NDArray[Any]]] = {"kl": [], "agrees": [], "same_choice": [], "error": [], "finite": []}
    for expected, found in zip(steps_of(reference, case), steps_of(candidate, case), strict=True):
        check_same_vocabulary(expected, found)
        columns["kl"].append(metrics.kl_divergence(expected, found))
        columns["agrees"].append(metrics.top1_agrees(expected, found, near_tie_nats))
        columns["same_choice"].append(metrics.top1_agrees(expected, found))
        columns["error"].append(metrics.logit_error(expected, found))
        columns["finite"].append(~np.isnan(found).any(axis=-1) & np.isfinite(found.max(axis=-1)))
        tick(case.name)
    return CaseResult(case, **{name: np.stack(values, axis=1) for name, values in columns.items()})


def check_same_vocabulary(expected: npt.NDArray[Any], found: npt.NDArray[Any]) -> None:
    if expected.shape != found.shape:
        raise UsageError(
            f"the reference answers with logits {list(expected.shape)} and the candidate with {list(found.shape)}: "
            "they are not the same model, or the vocabulary was padded on one side"
        )


def compare_greedy(
    reference: Stepper, candidate: Stepper, prompt: IntArray, steps: int, near_tie_nats: float, tick: Tick = silent
) -> GreedyResult:
    """Greedy decoding of ``prompt`` ``[S]`` in lockstep, both fed the reference's choice, until a difference is not a near tie.

    Until the first difference this is what each would generate on its own. At a near tie (the reference prefers its choice
    by less than ``near_tie_nats``) both continue on the reference's token, so one coin flip does not void the rest.
    """
    result = GreedyResult()
    lengths = np.array([len(prompt)], dtype=np.int64)
    reference.reset()
    candidate.reset()
    expected = reference.prefill(prompt[None, :], lengths)
    found = candidate.prefill(prompt[None, :], lengths)
    diverged = False
    for step in range(steps):
        wanted, chosen = int(np.argmax(expected[0])), int(np.argmax(found[0]))
        result.reference.append(wanted)
        result.candidate.append(chosen)
        tie = float(metrics.choice_gap(expected[0], np.array(chosen))) <= near_tie_nats
        diverged = diverged or not tie
        result.matched += not diverged
        result.near_ties += not diverged and chosen != wanted
        tick("greedy")
        if step + 1 < steps:
            token = np.array([wanted], dtype=np.int64)
            expected, found = reference.decode(token), candidate.decode(token)
    return result


def generate_greedy(session: Stepper, prompt: IntArray, steps: int, stop: Sequence[int] = ()) -> list[int]:
    """``steps`` greedy tokens of one session alone, ending early at a token of ``stop``."""
    session.reset()
    logits = session.prefill(prompt[None, :], np.array([len(prompt)], dtype=np.int64))
    tokens: list[int] = []
    while True:
        tokens.append(int(np.argmax(logits[0])))
        if len(tokens) == steps or tokens[-1] in stop:
            return tokens
        logits = session.decode(np.array(tokens[-1:], dtype=np.int64))
