"""Continuous batching: requests join and leave a running batch.

    submit ─▶ waiting ─(a row is free)─▶ reading its prompt, a piece per tick ─▶ one token per tick ─▶ done, the row is free

A *tick* is one ``Session.extend``: every answering row brings its last token, and rows still reading share
``prefill_tokens`` prompt tokens, oldest first. So a long prompt delays the others by a bounded time, and nobody waits for a
batch to end. Waiting requests are admitted in the order they came; the queue is bounded. Memory is ``rows * capacity`` cached
tokens, allocated at the start.

Each request has its own sampler, seed, stop strings and limits, and gets the tokens it would get alone, up to the rounding
between runs of different shapes. The session should have a graph that takes another number of tokens from each row
(``open_session(path, chunks=True)``); with any other the rows are run one after the other: right, but not faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from optkit.errors import LimitError, UsageError
from optkit.runtime.base import Session
from optkit.runtime.generate import Answer, Row, StreamEvent
from optkit.runtime.options import GenerationOptions, Request, resolve


@dataclass(eq=False)
class Ticket:
    """A submitted request.

    Attributes:
        number: in order of submission; the ``row`` of its events.
        request: resolved.
        row: its sampler, text and answer.
        read: prompt tokens in the cache.
    """

    number: int
    request: Request
    row: Row
    read: int = 0

    @property
    def answer(self) -> Answer:
        return self.row.answer

    @property
    def done(self) -> bool:
        return self.row.finished

    @property
    def prompt(self) -> list[int]:
        return self.request.prompts[0]

    def next_tokens(self, budget: int) -> list[int]:
        """What it brings to the next tick: at most ``budget`` tokens of its prompt, or its last token."""
        return self.prompt[self.read : self.read + budget] if self.read < len(self.prompt) else self.answer.tokens[-1:]


class Scheduler:
    """Runs requests together on one session.

    Args:
        session: its cache belongs to the scheduler from now on.
        rows: requests answered at a time.
        capacity: tokens per row, prompt and answer.
        prefill_tokens: prompt tokens read per tick, by all rows together.
        max_waiting: requests in the queue.
    """

    def __init__(
        self, session: Session, rows: int = 8, capacity: int = 1024, prefill_tokens: int = 128, max_waiting: int = 1024
    ) -> None:
        if min(rows, capacity, prefill_tokens, max_waiting) < 1:
            raise UsageError("scheduler: rows, capacity, prefill_tokens and max_waiting are at least 1")
        self.session = session
        self._capacity = capacity
        self._prefill_tokens = prefill_tokens
        self._max_waiting = max_waiting
        self._waiting: deque[Ticket] = deque()
        self._active: list[Ticket | None] = [None] * rows
        self._submitted = 0
        session.open_rows(rows, capacity)

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or any(ticket is not None for ticket in self._active)

    def submit(self, prompt: Any, **options: Any) -> Ticket:
        """Queues one prompt with its own generation options.

        Raises:
            LimitError: prompt and answer are longer than ``capacity``, or the queue is full.
            UsageError: options that need several rows or a batch of their own.
        """
        given = GenerationOptions.of(options)
        if given.num_return_sequences > 1 or given.num_beams > 1 or given.speculative is not None or given.stream is not None:
            raise UsageError(
                "scheduler: one answer per request, without beams, speculation or callback; submit it several times"
            )
        if len(self._waiting) >= self._max_waiting:
            raise LimitError(f"{self._max_waiting} requests are waiting (max_waiting): try again later")
        request = resolve(self.session, prompt, given)
        if len(request.prompts) > 1:
            raise UsageError(f"scheduler: {len(request.prompts)} prompts in one request; submit them one by one")
        need = len(request.prompts[0]) + request.max_new_tokens
        if need > self._capacity:
            raise LimitError(f"prompt and max_new_tokens need {need} positions, and capacity is {self._capacity} per row")
        ticket = Ticket(self._submitted, request, Row(self.session, request, 0))
        self._submitted += 1
        self._waiting.append(ticket)
        return ticket

    def tick(self) -> list[StreamEvent]:
        """One run of the engine; the tokens it gave. Nothing happens when nobody waits."""
        self._admit()
        brought = self._bring()
        if not brought:
            return []
        counts = np.array([len(brought.get(slot, ())) for slot in range(len(self._active))], np.int64)
        ids = np.zeros((len(counts), int(counts.max())), np.int64)
        for slot, tokens in brought.items():
            ids[slot, : len(tokens)] = tokens
        logits = self.session.extend(ids, counts)
        events = []
        for slot, tokens in brought.items():
            ticket = self._active[slot]
            assert ticket is not None
            ticket.read = min(len(ticket.prompt), ticket.read + len(tokens))
            if ticket.read == len(ticket.prompt):
                event = ticket.row.take(logits[slot])
                events.append(
                    StreamEvent(ticket.number, event.token, event.text, event.logprob, event.top_logprobs, event.finish_reason)
                )
        self._retire()
        return events

    def events(self) -> Iterator[StreamEvent]:
        """Ticks until every submitted request is answered; more may be submitted meanwhile."""
        while self.busy:
            yield from self.tick()

    def run(self) -> None:
        """Answers everything that was submitted."""
        for _ in self.events():
            pass

    def _admit(self) -> None:
        for slot, ticket in enumerate(self._active):
            if ticket is None and self._waiting:
                self._active[slot] = self._waiting.popleft()

    def _bring(self) -> dict[int, list[int]]:
        """Slot -> tokens of the next tick; the oldest readers get the prompt budget."""
        budget = self._prefill_tokens
        brought = {}
        active = [(ticket.number, slot, ticket) for slot, ticket in enumerate(self._active) if ticket is not None]
        for _, slot, ticket in sorted(active, key=lambda entry: entry[0]):
            reading = ticket.read < len(ticket.prompt)
            tokens = ticket.next_tokens(budget)
            budget -= len(tokens) if reading else 0
            if tokens:
                brought[slot] = tokens
        return brought

    def _retire(self) -> None:
        lengths = self.session.lengths
        for slot, ticket in enumerate(self._active):
            if ticket is not None and ticket.done:
                self._active[slot] = None
                lengths[slot] = 0
        self.session.truncate(lengths)
