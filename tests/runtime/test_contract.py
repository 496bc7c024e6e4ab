"""What every backend promises, on every kind of model it can be asked to run; the oracle is transformers without a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optkit.errors import LimitError, UnsupportedError, UsageError
from optkit.runtime.session import Session, open_session
from tests import tiny

# (backend, model): plain; window of 8 in every layer; alternating windows with soft caps; a rotary table that switches at 64;
# convolutional state beside attention
CASES = [
    ("torch", "llama"),
    ("ort", "llama"),
    ("torch", "mistral"),
    ("ort", "mistral"),
    ("ort", "gemma2"),
    ("torch", "phi3_longrope"),
    ("ort", "phi3_longrope"),
    ("ort", "lfm2"),
    ("ort chunks", "llama"),
    ("ort chunks", "mistral"),
]
# Two float32 computations of the same two-layer model differ by roundings: up to 3e-6 of the logit range measured.
RELATIVE = 1e-5


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(scope="module")
def path(case: tuple[str, str], checkpoint: Callable[..., Path], artifact: Callable[..., Path]) -> Path:
    if case[0] == "torch":
        return checkpoint(case[1])
    return artifact(case[1], chunks=True) if "chunks" in case[0] else artifact(case[1])


@pytest.fixture(scope="module")
def options(case: tuple[str, str]) -> dict[str, Any]:
    return {"threads": 1, "chunks": True} if "chunks" in case[0] else {"threads": 1}


@pytest.fixture(scope="module")
def session(path: Path, options: dict[str, Any]) -> Iterator[Session]:
    with open_session(path, **options) as opened:
        yield opened


@pytest.fixture(scope="module")
def truth(case: tuple[str, str]) -> Callable[[np.ndarray], np.ndarray]:
    """Logits ``[S, V]`` of one row by transformers, without cache, padding or batch."""
    model = tiny.build(case[1])

    def run(ids: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            row = torch.from_numpy(np.asarray(ids))[None]
            return model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False).logits[0].numpy()

    return run


def tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, tiny.VOCAB, shape)


def assert_close(ours: np.ndarray, want: np.ndarray) -> None:
    assert ours.dtype == np.float32
    assert ours.shape == want.shape
    assert np.abs(ours - want).max() <= RELATIVE * np.ptp(want)


def test_prompt_and_every_step_equal_transformers_without_a_cache(session, truth) -> None:
    ids = tokens(20)
    assert_close(session.prefill(ids[None, :6], logits="all")[0], truth(ids[:6]))
    for end in range(7, 21):
        assert_close(session.decode(ids[end - 1 : end])[0], truth(ids[:end])[-1])


def test_a_prompt_read_at_once_equals_one_token_at_a_time(session) -> None:
    ids = tokens(1, 17)
    whole = session.prefill(ids)
    logits = session.prefill(ids[:, :1])
    for column in range(1, 17):
        logits = session.decode(ids[:, column])
    assert_close(logits, whole)


def test_reset_and_a_second_prefill_restore_the_first_answer(session) -> None:
    ids = tokens(2, 9)
    first = session.prefill(ids)
    session.decode([7, 8])
    session.reset()
    assert session.batch == 0
    np.testing.assert_array_equal(session.prefill(ids), first)
    session.prefill(tokens(2, 12, seed=5))
    np.testing.assert_array_equal(session.prefill(ids), first)


def test_ragged_rows_answer_as_if_alone_whatever_the_padding(session, truth) -> None:
    """optimum#877, #1146; transformers#22707, #30378; exllamav2#200: outputs depended on padding and batch mates."""
    ids, lengths = tokens(3, 13), [4, 13, 9]
    forced = tokens(3, 6, seed=1)
    for padding in (0, 1, 16):
        padded = np.pad(ids, ((0, 0), (0, padding)), constant_values=tiny.PAD)
        logits = session.prefill(padded, lengths, logits="all")
        for row, length in enumerate(lengths):
            assert_close(logits[row, :length], truth(ids[row, :length]))
            assert not logits[row, length:].any()
        for step in range(6):
            logits = session.decode(forced[:, step])
            for row, length in enumerate(lengths):
                assert_close(logits[row], truth(np.concatenate([ids[row, :length], forced[row, : step + 1]]))[-1])


def test_right_answers_past_every_kernel_threshold(session, truth) -> None:
    """GPTQ-for-LLaMa#91: right in perplexity, wrong after 128 generated tokens."""
    ids = tokens(1, 200)
    session.prefill(ids[:, :3])
    for end in range(4, 201):
        logits = session.decode(ids[:, end - 1])
        if end in (8, 9, 33, 64, 65, 66, 129, 200):
            assert_close(logits[0], truth(ids[0, :end])[-1])


def test_several_tokens_at_once_equal_single_steps(session, truth) -> None:
    ids = tokens(2, 15)
    session.prefill(ids[:, :5])
    logits = session.decode(ids[:, 5:9])
    assert logits.shape == (2, 4, tiny.VOCAB)
    for row in range(2):
        assert_close(logits[row], truth(ids[row, :9])[5:])
    session.decode(ids[:, 9])
    assert_close(session.extend(ids[:, 10:])[1], truth(ids[1])[-1])


def test_rows_may_bring_different_numbers_of_tokens_and_none(session, truth) -> None:
    ids, more = tokens(3, 6), tokens(3, 4, seed=2)
    session.prefill(ids, [6, 2, 4])
    logits = session.extend(more, [2, 0, 4])
    assert session.lengths.tolist() == [8, 2, 8]
    assert not logits[1].any()
    assert_close(logits[0], truth(np.concatenate([ids[0], more[0, :2]]))[-1])
    assert_close(logits[2], truth(np.concatenate([ids[2, :4], more[2]]))[-1])
    logits = session.decode([9, 9, 9])
    assert_close(logits[1], truth(np.concatenate([ids[1, :2], [9]]))[-1])


def test_rows_may_join_and_leave_at_any_time(session, truth) -> None:
    ids = tokens(3, 14)
    session.open_rows(3, capacity=40)
    session.extend(ids[:, :5], [5, 0, 0])
    session.extend(ids[:, 5:9], [1, 4, 0])
    logits = session.extend(ids[:, 9:12], [1, 1, 3])
    assert_close(logits[0], truth(ids[0, [0, 1, 2, 3, 4, 5, 9]])[-1])
    assert_close(logits[1], truth(ids[1, [5, 6, 7, 8, 9]])[-1])
    assert_close(logits[2], truth(ids[2, 9:12])[-1])
    session.truncate([7, 0, 3])
    logits = session.extend(ids[:, :4], [1, 4, 1])
    assert_close(logits[1], truth(ids[1, :4])[-1])
    assert_close(logits[0], truth(ids[0, [0, 1, 2, 3, 4, 5, 9, 0]])[-1])


def test_truncated_tokens_leave_no_trace(session, truth) -> None:
    ids = tokens(2, 12)
    session.prefill(ids)
    if session.recurrent:
        with pytest.raises(UnsupportedError, match="recurrent state"):
            session.truncate([5, 9])
        return
    session.truncate([5, 9])
    assert session.lengths.tolist() == [5, 9]
    logits = session.decode([3, 4])
    assert_close(logits[0], truth(np.concatenate([ids[0, :5], [3]]))[-1])
    assert_close(logits[1], truth(np.concatenate([ids[1, :9], [4]]))[-1])


def test_rows_can_be_dropped_reordered_and_repeated(session, truth) -> None:
    ids = tokens(3, 8)
    session.prefill(ids, [8, 5, 7])
    session.select([2, 0])
    assert session.lengths.tolist() == [7, 8]
    session.decode([3, 4])
    session.select([1, 0, 1, 1])
    logits = session.decode([5, 6, 7, 8])
    assert_close(logits[1], truth(np.concatenate([ids[2, :7], [3, 6]]))[-1])
    for row, token in ((0, 5), (2, 7), (3, 8)):
        assert_close(logits[row], truth(np.concatenate([ids[0, :8], [4, token]]))[-1])


def test_an_outgrown_cache_keeps_its_content(session, truth) -> None:
    ids = tokens(2, 110)
    session.prefill(ids[:, :3], [3, 2])
    start = session.capacity
    for end in range(4, 111):
        logits = session.decode(ids[:, end - 1])
    assert session.capacity > start
    assert_close(logits[0], truth(ids[0])[-1])
    assert_close(logits[1], truth(np.concatenate([ids[1, :2], ids[1, 3:]]))[-1])


def test_a_long_prompt_read_in_chunks_is_the_same_prompt(path, options, session) -> None:
    ids, lengths = tokens(3, 40), [40, 3, 17]
    want, every = session.prefill(ids, lengths), session.prefill(ids, lengths, logits="all")
    with open_session(path, **options, prefill_chunk=7) as chunked:
        assert_close(chunked.prefill(ids, lengths), want)
        assert_close(chunked.prefill(ids, lengths, logits="all"), every)


def test_max_seq_len_tokens_fit_and_one_more_does_not(path, options) -> None:
    with open_session(path, **options, max_seq_len=12) as session:
        with pytest.raises(LimitError, match="13 positions, and max_seq_len is 12"):
            session.prefill(tokens(1, 13))
        session.prefill(tokens(1, 12))
        with pytest.raises(LimitError, match="max_seq_len"):
            session.decode([5])
        session.prefill(tokens(2, 11))
        session.decode([5, 6])
        assert session.lengths.tolist() == [12, 12]


def test_the_model_s_own_limit_is_the_default(session) -> None:
    assert session.max_seq_len == tiny.POSITIONS
    session.prefill(tokens(1, tiny.POSITIONS))
    with pytest.raises(LimitError):
        session.decode([5])


def test_wrong_calls_are_refused_with_what_is_expected(session) -> None:
    session.reset()
    with pytest.raises(UsageError, match="call prefill first"):
        session.decode([1])
    with pytest.raises(UsageError, match=r"shape \[B, S\]"):
        session.prefill([1, 2, 3])
    with pytest.raises(UsageError, match="lengths"):
        session.prefill(tokens(2, 3), [3, 4])
    with pytest.raises(UsageError, match=f"token {tiny.VOCAB}"):
        session.prefill([[5, tiny.VOCAB]])
    session.prefill(tokens(2, 3))
    with pytest.raises(UsageError, match="2 rows, not 3"):
        session.decode([1, 2, 3])
    with pytest.raises(UsageError, match="truncate"):
        session.truncate([4, 1])
    with pytest.raises(UsageError, match="select"):
        session.select([2])


def test_returned_logits_are_the_caller_s_own(session) -> None:
    session.prefill(tokens(1, 4))
    first = session.decode([5])
    kept = first.copy()
    session.decode([6])
    np.testing.assert_array_equal(first, kept)
