"""Requests that come and go are answered as if each were alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from optkit.errors import LimitError, UsageError
from optkit.runtime.scheduler import Scheduler
from optkit.runtime.session import open_session
from tests.runtime.scripted import ScriptedSession, byte_tokens, random_model, saying, write_tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "model")


def test_every_request_gets_its_own_answer(directory: Path) -> None:
    texts = {f"{n}?": "x" * n + f" answer {n}" for n in range(9)}
    session = ScriptedSession(directory, saying({tuple(byte_tokens(p)): byte_tokens(t) for p, t in texts.items()}))
    scheduler = Scheduler(session, rows=3, capacity=64)
    tickets = [scheduler.submit(prompt, max_new_tokens=40) for prompt in texts]
    shown: dict[int, str] = {}
    for event in scheduler.events():
        shown[event.row] = shown.get(event.row, "") + event.text
    assert [ticket.answer.text for ticket in tickets] == list(texts.values())
    assert list(shown.values()) != []
    assert [shown[n] for n in range(9)] == list(texts.values())
    assert all(ticket.answer.finish_reason == "eos" for ticket in tickets)


def test_requests_keep_their_own_options_and_seeds(directory: Path) -> None:
    requests = [
        {"max_new_tokens": 12, "temperature": 0.9, "seed": 4},
        {"max_new_tokens": 5},
        {"max_new_tokens": 20, "repetition_penalty": 1.5, "logprobs": True},
        {"max_new_tokens": 9, "top_k": 3, "seed": 8},
        {"max_new_tokens": 15, "bad_words": [[9]]},
    ]
    alone = ScriptedSession(directory, random_model())
    scheduler = Scheduler(ScriptedSession(directory, random_model()), rows=2, capacity=64, prefill_tokens=3)
    tickets = [scheduler.submit([5 + n] * (n + 1), ignore_eos=True, **options) for n, options in enumerate(requests)]
    scheduler.run()
    for n, (ticket, options) in enumerate(zip(tickets, requests, strict=True)):
        want = alone.generate([5 + n] * (n + 1), ignore_eos=True, **options).sequences[0]
        assert ticket.answer.tokens == want.tokens
        assert ticket.answer.logprobs == want.logprobs


def test_a_long_prompt_is_read_in_pieces_while_others_go_on(directory: Path) -> None:
    session = ScriptedSession(directory, random_model())
    scheduler = Scheduler(session, rows=2, capacity=200, prefill_tokens=10)
    first = scheduler.submit([5], max_new_tokens=30, ignore_eos=True)
    scheduler.tick()
    late = scheduler.submit([6] * 95, max_new_tokens=3, ignore_eos=True)
    ticks = 0
    while not late.answer.tokens:
        before = len(first.answer.tokens)
        scheduler.tick()
        assert len(first.answer.tokens) == before + 1
        ticks += 1
    assert ticks == 10
    assert max(sum(counts) for _, counts in session.runs) <= 11


def test_rows_are_given_in_the_order_of_asking_and_freed_at_once(directory: Path) -> None:
    session = ScriptedSession(directory, random_model())
    scheduler = Scheduler(session, rows=2, capacity=32)
    for n in range(6):
        scheduler.submit([5 + n], max_new_tokens=2 + n % 3, ignore_eos=True)
    order = [event.row for event in scheduler.events()]
    starts = [order.index(n) for n in range(6)]
    assert starts == sorted(starts)
    assert session.lengths.tolist() == [0, 0]
    assert not scheduler.busy
    assert scheduler.tick() == []
    counts = [sum(count > 0 for count in run) for _, run in session.runs]
    assert counts[:-2] == [2] * (len(counts) - 2), "no row idles while requests wait"


def test_requests_may_be_added_while_others_run(directory: Path) -> None:
    scheduler = Scheduler(ScriptedSession(directory, random_model()), rows=2, capacity=32)
    scheduler.submit([5], max_new_tokens=3, ignore_eos=True)
    added = []
    for event in scheduler.events():
        if event.finish_reason and len(added) < 4:
            added.append(scheduler.submit([event.token], max_new_tokens=2, ignore_eos=True))
    assert [len(ticket.answer.tokens) for ticket in added] == [2, 2, 2, 2]


def test_what_does_not_fit_or_go_together_is_refused_at_submission(directory: Path) -> None:
    scheduler = Scheduler(ScriptedSession(directory, random_model()), rows=1, capacity=16, max_waiting=2)
    with pytest.raises(LimitError, match="17 positions, and capacity is 16"):
        scheduler.submit([5] * 10, max_new_tokens=7)
    for wrong in ({"num_beams": 2}, {"num_return_sequences": 2}, {"speculative": "prompt_lookup"}):
        with pytest.raises(UsageError, match="one answer per request"):
            scheduler.submit([5], max_new_tokens=2, **wrong)
    with pytest.raises(UsageError, match="2 prompts"):
        scheduler.submit([[5], [6]], max_new_tokens=2)
    for _ in range(2):
        scheduler.submit([5], max_new_tokens=2)
    with pytest.raises(LimitError, match="2 requests are waiting"):
        scheduler.submit([5], max_new_tokens=2)


@pytest.mark.parametrize("chunks", [True, False])
def test_a_mixed_batch_on_onnx_runtime_answers_as_each_request_alone(artifact: Callable[..., Path], chunks: bool) -> None:
    rng = np.random.default_rng(0)
    requests = [
        (rng.integers(5, 120, n).tolist(), int(new))
        for n, new in zip((3, 40, 12, 1, 25, 8), rng.integers(5, 30, 6), strict=True)
    ]
    with open_session(artifact("mistral", chunks=True), threads=1, chunks=chunks) as session:
        want = [session.generate(prompt, max_new_tokens=new, temperature=0.8, seed=2).tokens[0] for prompt, new in requests]
        scheduler = Scheduler(session, rows=3, capacity=80, prefill_tokens=7)
        addresses = session.cache.addresses()  # type: ignore[attr-defined]
        tickets = [scheduler.submit(prompt, max_new_tokens=new, temperature=0.8, seed=2) for prompt, new in requests]
        scheduler.run()
        assert [ticket.answer.tokens for ticket in tickets] == want
        assert session.cache.addresses() == addresses  # type: ignore[attr-defined]
