"""Beam search against transformers' own, token by token and score by score."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from optkit.errors import UsageError
from optkit.runtime.session import open_session
from tests import tiny


def theirs(prompt: list[int], **options: object) -> tuple[list[list[int]], list[float]]:
    model = tiny.build("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            pad_token_id=tiny.PAD,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    rows = []
    for row in result.sequences[:, len(prompt) :].tolist():
        rows.append(row[: row.index(tiny.EOS) + 1] if tiny.EOS in row else row)
    return rows, result.sequences_scores.tolist()


@pytest.mark.parametrize("backend", ["ort", "torch"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_beams": 4, "num_return_sequences": 3},
        {"num_beams": 3, "length_penalty": 0.0},
        {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
        {"num_beams": 3, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    ],
    ids=str,
)
def test_answers_and_scores_are_those_of_transformers(
    checkpoint: Callable[..., Path], artifact: Callable[..., Path], backend: str, options: dict
) -> None:
    prompts = [np.random.default_rng(n).integers(5, 120, n).tolist() for n in (5, 12)]
    with open_session(artifact("llama") if backend == "ort" else checkpoint("llama"), threads=1) as session:
        found = session.generate(prompts, max_new_tokens=20, **options)
    ours = iter(found.sequences)
    for number, prompt in enumerate(prompts):
        for tokens, score in zip(*theirs(prompt, max_new_tokens=20, **options), strict=True):
            answer = next(ours)
            assert answer.prompt_index == number
            assert answer.tokens == tokens
            assert answer.score == pytest.approx(score, abs=1e-4)


def test_what_beams_cannot_do_is_refused(artifact: Callable[..., Path]) -> None:
    with open_session(artifact("llama"), threads=1) as session:
        for wrong in ({"do_sample": True}, {"logprobs": True}, {"speculative": "prompt_lookup"}):
            with pytest.raises(UsageError, match="num_beams"):
                session.generate([5, 6], num_beams=2, **wrong)
        with pytest.raises(UsageError, match="at most num_beams"):
            session.generate([5, 6], num_beams=2, num_return_sequences=3)
