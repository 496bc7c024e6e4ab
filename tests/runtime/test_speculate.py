"""Guesses change the cost of an answer and never the answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from optkit.errors import UnsupportedError, UsageError
from optkit.runtime.session import open_session
from optkit.runtime.speculate import Governor, PromptLookup
from tests.runtime.scripted import ScriptedSession, byte_tokens, one_hot, random_model, saying, write_tokenizer


class Guesser:
    """Proposes what it is told, whatever comes."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)
        self.asked: list[int] = []

    def propose(self, tokens: np.ndarray, count: int) -> list[int]:
        self.asked.append(count)
        return self.tokens[:count]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "model")


@pytest.fixture(autouse=True)
def steps_that_all_take_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check costs one step, so that the governor's decisions do not depend on the machine."""
    monkeypatch.setattr("optkit.runtime.stats.Recorder.ran_decode", lambda self, began: _count(self))


def _count(recorder: object) -> float:
    recorder.decodes += 1  # type: ignore[attr-defined]
    return 1.0


COPY = "the cat sat on the mat; the cat sat on the mat; the cat sat on the mat; the cat"


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "seed": 3}, {"repetition_penalty": 1.3}, {"top_logprobs": 2}, {"stop": "mat; t"}]
)
def test_prompt_lookup_gives_the_same_answer_in_fewer_runs(directory: Path, options) -> None:
    session = ScriptedSession(directory, saying({tuple(byte_tokens("?")): byte_tokens(COPY)}))
    plain = session.generate("?", max_new_tokens=70, **options)
    guessed = session.generate("?", max_new_tokens=70, speculative="prompt_lookup", **options)
    assert guessed.tokens == plain.tokens
    assert guessed.sequences[0].logprobs == plain.sequences[0].logprobs
    assert guessed.sequences[0].finish_reason == plain.sequences[0].finish_reason
    assert guessed.stats.decodes < plain.stats.decodes
    assert guessed.stats.new_tokens == plain.stats.new_tokens
    assert 0 < guessed.stats.acceptance_rate <= 1


@pytest.mark.parametrize("guess", [(), (5,), (5, 6, 7), tuple(byte_tokens("abcabcabc"))])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 9}])
def test_wrong_and_half_right_guesses_leave_no_trace(directory: Path, guess, options) -> None:
    session = ScriptedSession(directory, random_model())
    want = session.generate("ab", max_new_tokens=30, ignore_eos=True, **options)
    cached = session.cached_tokens
    guesser = Guesser(*guess)
    assert session.generate("ab", max_new_tokens=30, ignore_eos=True, speculative=guesser, **options).tokens == want.tokens
    assert session.cached_tokens == cached


def test_guesses_stay_within_max_new_tokens_and_the_limit(directory: Path) -> None:
    text = byte_tokens("aaaaaaaaaaaaaaaaaaaaaaaaaaaaa")
    session = ScriptedSession(directory, saying({tuple(byte_tokens("?")): text}), max_seq_len=12)
    guesser = Guesser(*text)
    result = session.generate("?", max_new_tokens=11, speculative=guesser)
    assert result.tokens == [text[:11]]
    assert session.lengths[0] <= 11


def test_an_end_inside_a_guess_ends_the_row_there(directory: Path) -> None:
    session = ScriptedSession(directory, saying({tuple(byte_tokens("?")): byte_tokens("abc")}))
    result = session.generate("?", max_new_tokens=20, speculative=Guesser(*byte_tokens("c"), 2, 2, 2))
    assert (result.text, result.sequences[0].finish_reason) == ("abc", "eos")


def test_prompt_lookup_proposes_what_followed_the_last_occurrence() -> None:
    lookup = PromptLookup()
    tokens = np.array([1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 7, 1, 2, 3])
    assert lookup.propose(tokens, 3) == [5, 6, 7]
    assert lookup.propose(np.append(tokens, 4), 4) == [9, 1, 2, 3]  # the longer match wins over the later one
    assert lookup.propose(np.append(tokens, [4, 8]), 4) == []
    assert PromptLookup().propose(np.array([1]), 4) == []
    assert PromptLookup().propose(np.array([7, 7, 7, 7]), 2) == [7]


def test_the_index_grows_with_the_row() -> None:
    grown, rng = PromptLookup(), np.random.default_rng(0)
    tokens = rng.integers(0, 4, 200)
    for end in range(1, 201):
        assert grown.propose(tokens[:end], 5) == PromptLookup().propose(tokens[:end], 5)


def test_guessing_switches_itself_off_where_it_does_not_pay() -> None:
    governor = Governor(8)
    assert governor.count() == 0, "there is no plain step to compare with yet"
    lost = 0.0
    for _ in range(1000):
        if count := governor.count():
            governor.checked(count, 0, 1.5)
            lost += 0.5
        else:
            governor.plain(1.0)
    assert lost / 1000 < 0.02
    assert lost > 0


def test_guesses_get_longer_while_they_are_right() -> None:
    governor = Governor(8)
    governor.plain(1.0)
    lengths = []
    for _ in range(4):
        lengths.append(governor.count())
        governor.checked(lengths[-1], lengths[-1], 1.2)
    assert lengths == [2, 4, 8, 8]
    governor.checked(8, 1, 1.2)
    assert governor.count() == 2


def test_a_draft_session_guesses_and_the_target_decides(checkpoint: Callable[..., Path], artifact: Callable[..., Path]) -> None:
    prompt = np.random.default_rng(0).integers(5, 120, 9).tolist()
    with open_session(artifact("llama"), threads=1) as target, open_session(checkpoint("llama"), threads=1) as same:
        want = target.generate(prompt, max_new_tokens=30, ignore_eos=True)
        drafted = target.generate(prompt, max_new_tokens=30, ignore_eos=True, speculative=same)
        assert drafted.tokens == want.tokens
        assert drafted.stats.acceptance_rate == 1.0
        assert drafted.stats.decodes <= 8
        with open_session(checkpoint("llama", attention_bias=True), threads=1) as other:
            assert target.generate(prompt, max_new_tokens=30, ignore_eos=True, speculative=other).tokens == want.tokens
        with pytest.raises(UsageError, match="another session"):
            target.generate(prompt, speculative=target)


def test_what_cannot_speculate_says_so(directory: Path) -> None:
    session = ScriptedSession(directory, one_hot)
    session.recurrent = True
    with pytest.raises(UnsupportedError, match="recurrent"):
        session.generate("a", speculative="prompt_lookup")
    with pytest.raises(UsageError, match="'lookup'"):
        ScriptedSession(directory, one_hot).generate("a", speculative="lookup")
    with pytest.raises(UsageError, match="same vocabulary"):
        ScriptedSession(directory, one_hot).generate("a", speculative=ScriptedSession(directory, one_hot, vocab_size=9))


@pytest.mark.parametrize("model", ["llama", "mistral", "phi3_longrope"])
def test_tokens_are_the_same_on_onnx_runtime(artifact: Callable[..., Path], model: str) -> None:
    prompt = [9, 10, 11, 12, 13] * 8
    with open_session(artifact(model), threads=1) as session:
        want = session.generate(prompt, max_new_tokens=50, ignore_eos=True)
        guessed = session.generate(prompt, max_new_tokens=50, ignore_eos=True, speculative=Guesser(9, 10, 11))
        looked_up = session.generate(prompt, max_new_tokens=50, ignore_eos=True, speculative="prompt_lookup")
        assert guessed.tokens == looked_up.tokens == want.tokens
        assert guessed.stats.drafted_tokens > 0
