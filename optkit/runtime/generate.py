"""One plain loop that turns logits into text, the same for every backend.

    resolve ── prefill ─┬─▶ choose a token per row ─▶ events ─▶ rows that ended leave ─┐
                        └────────────────────────── decode ◀──────────────────────────┘

``n`` tokens cost one prefill and ``n − 1`` decodes: the last token is never fed. Rows of a batch do not influence each other;
a row that ends leaves the batch, and the others go on in a smaller one. With several answers per prompt the prompt is read
once and its cache copied. A speculator, if there is one, proposes tokens that one ``decode`` checks together: the row's
sampler chooses from each position's logits in turn and stops at the first choice that differs from the proposal, so the
result (greedy or sampled) is the one of plain decoding.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from optkit.runtime.options import GenerationOptions, Request, resolve
from optkit.runtime.sampling import Logits, RowSampler, log_sum_exp, top_logprobs
from optkit.runtime.speculate import Governor, make_guesser
from optkit.runtime.stats import GenerationStats, Recorder

if TYPE_CHECKING:
    from optkit.runtime.base import Session
    from optkit.runtime.tokenizer import Detokenizer, StopStrings

TopLogprobs = list[tuple[int, float]]


@dataclass(frozen=True)
class StreamEvent:
    """One chosen token.

    Attributes:
        row: answer number; prompts times answers per prompt, a prompt's answers together.
        token: its id.
        text: text that is now certain; empty while a character or a possible stop string is incomplete.
        logprob, top_logprobs: if asked for.
        finish_reason: ``None``, or why the row ended here: ``eos``, ``stop`` or ``length``.
        stats: of the whole call, with the last event.
    """

    row: int
    token: int
    text: str
    logprob: float | None = None
    top_logprobs: TopLogprobs | None = None
    finish_reason: str | None = None
    stats: GenerationStats | None = None


@dataclass
class Answer:
    """One generated sequence.

    Attributes:
        row, prompt_index: which answer, to which prompt.
        tokens: the new ones; an end-of-sequence token, or those of a stop string, included.
        text: without special tokens and without the stop string; empty for a model without a tokenizer.
        finish_reason: ``eos``, ``stop`` or ``length``.
        stop: the stop string that ended it.
        seed: of its draws.
        logprobs, top_logprobs: per token, if asked for.
        score: of beam search.
    """

    row: int
    prompt_index: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    stop: str | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogprobs] | None = None
    score: float | None = None


@dataclass(frozen=True)
class GenerationResult:
    """All answers, in row order, and what they cost."""

    sequences: list[Answer]
    stats: GenerationStats

    @property
    def texts(self) -> list[str]:
        return [answer.text for answer in self.sequences]

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.sequences[0].text

    @property
    def tokens(self) -> list[list[int]]:
        return [answer.tokens for answer in self.sequences]


def generate(session: Session, prompts: Any, **options: Any) -> GenerationResult:
    """Answers to one or many prompts.

    Args:
        session: open model; its cache is overwritten.
        prompts: a string, token ids ``[S]``, a chat (messages with ``role`` and ``content``), or a list of one of these.
        options: :class:`GenerationOptions`.

    Raises:
        UsageError, LimitError: refused before anything ran.
        EngineError: the engine failed, or answered with NaN or infinity.
    """
    recorder = Recorder()
    request = resolve(session, prompts, GenerationOptions.of(options))
    if request.options.num_beams > 1:
        from optkit.runtime.beam import beam_search

        return beam_search(session, request, recorder)
    run = _Run(session, request, recorder)
    callback = request.options.stream
    stats = None
    for event in run.events():
        stats = event.stats
        if callback is not None:
            callback(event)
    assert stats is not None, "the last event carries the statistics"
    return GenerationResult([row.answer for row in run.rows], stats)


def stream(session: Session, prompts: Any, **options: Any) -> Iterator[StreamEvent]:
    """Like :func:`generate`, as an iterator over tokens; refusals are raised here, before the first one is asked for."""
    recorder = Recorder()
    request = resolve(session, prompts, GenerationOptions.of(options))
    return _Run(session, request, recorder).events()


class Row:
    """One answer in the making: sampler, text and end conditions."""

    def __init__(self, session: Session, request: Request, number: int) -> None:
        options = request.options
        prompt_index = number // options.num_return_sequences
        self.answer = Answer(number, prompt_index, request.seeds[number][0])
        self.sampler = RowSampler(
            request.sampling,
            request.prompts[prompt_index],
            sorted(request.eos),
            request.seeds[number],
            number,
            options.logits_processors,
        )
        self._eos = request.eos
        self._budget = request.max_new_tokens
        self._wanted = options.top_logprobs
        self._with_logprobs = options.logprobs or options.top_logprobs > 0
        if self._with_logprobs:
            self.answer.logprobs = []
            self.answer.top_logprobs = [] if self._wanted else None
        self._detokenizer: Detokenizer | None = None
        self._stops: StopStrings | None = None
        if session.has_tokenizer:
            from optkit.runtime.tokenizer import StopStrings

            self._detokenizer = session.tokenizer.detokenizer(options.skip_special_tokens)
            self._stops = StopStrings(request.stops)

    @property
    def finished(self) -> bool:
        return bool(self.answer.finish_reason)

    @property
    def left(self) -> int:
        """Tokens it may still make."""
        return self._budget - len(self.answer.tokens)

    def take(self, logits: Logits) -> StreamEvent:
        """Chooses from ``logits [V]`` and updates text and end."""
        answer = self.answer
        token = self.sampler.next(logits)
        answer.tokens.append(token)
        logprob, top = self._logprobs(logits, token) if self._with_logprobs else (None, None)
        text = self._text(token)
        if token in self._eos:
            answer.finish_reason = "eos"
        elif answer.stop is not None:
            answer.finish_reason = "stop"
        elif len(answer.tokens) == self._budget:
            answer.finish_reason = "length"
        if answer.finish_reason in ("eos", "length"):
            text += self._rest()
        answer.text += text
        return StreamEvent(answer.row, token, text, logprob, top, answer.finish_reason or None)

    def _logprobs(self, logits: Logits, token: int) -> tuple[float, TopLogprobs | None]:
        assert self.answer.logprobs is not None
        logprob = float(logits[token]) - log_sum_exp(logits)
        self.answer.logprobs.append(logprob)
        if self.answer.top_logprobs is None:
            return logprob, None
        top = top_logprobs(logits, self._wanted)
        self.answer.top_logprobs.append(top)
        return logprob, top

    def _text(self, token: int) -> str:
        if self._detokenizer is None or self._stops is None:
            return ""
        piece, self.answer.stop = self._stops.push(self._detokenizer.push(token))
        return piece

    def _rest(self) -> str:
        """Text held back when the row ends: the tail of a character, or what looked like the beginning of a stop string."""
        if self._detokenizer is None or self._stops is None:
            return ""
        piece, stop = self._stops.push(self._detokenizer.flush())
        self.answer.stop = stop
        if stop is not None:
            self.answer.finish_reason = "stop"
        return piece + self._stops.flush()


def _looked_at(request: Request) -> int:
    """How many of the largest logits decide a token of this request; 0: all may."""
    options, sampling = request.options, request.sampling
    if options.logits_processors or options.logprobs or options.top_logprobs or not sampling.plain:
        return 0
    return sampling.top_k if sampling.do_sample else 1


class _Run:
    """The loop's state for one call."""

    def __init__(self, session: Session, request: Request, recorder: Recorder) -> None:
        self.session = session
        self.request = request
        self.recorder = recorder
        count = len(request.prompts) * request.options.num_return_sequences
        self.rows = [Row(session, request, number) for number in range(count)]
        self.guesser = make_guesser(session, request.options.speculative)
        self.governor = Governor(request.options.draft_tokens)
        self.top = _looked_at(request)

    def events(self) -> Iterator[StreamEvent]:
        logits = self._read_prompts()
        live = list(self.rows)
        guess: list[int] = []  # tokens of the only row that were fed unchosen: logits is then [1, 1 + guesses, V]
        while True:
            events = self._check(live[0], logits[0], guess) if guess else [row.take(logits[n]) for n, row in enumerate(live)]
            self.recorder.chose(len(events))
            still = [slot for slot, row in enumerate(live) if not row.finished]
            if not still:
                yield from self._closing(events)
                return
            yield from events
            if len(still) < len(live):
                self.session.select(still)
                live = [live[slot] for slot in still]
            logits, guess = self._advance(live)

    def _advance(self, live: list[Row]) -> tuple[Logits, list[int]]:
        """Feeds each row's last token, and for a single row perhaps guesses after it."""
        began = time.perf_counter()
        guess = self._guess(live[0]) if self.guesser is not None and len(live) == 1 else []
        last = np.array([row.answer.tokens[-1] for row in live], np.int64)
        logits = self.session.decode([[last[0], *guess]]) if guess else self.session.decode(last, copy=False, top=self.top)
        self.took = self.recorder.ran_decode(began)
        if not guess and len(live) == 1:
            self.governor.plain(self.took)
        return logits, guess

    def _guess(self, row: Row) -> list[int]:
        assert self.guesser is not None
        length, switch = row.sampler.history.length, self.session.rope_switch
        room = min(row.left - 1, self.session.max_seq_len - length)
        if switch is not None and length <= switch:  # beyond it all positions are read anew, and these would be as well
            room = min(room, switch - length)
        count = min(self.governor.count(), room)
        return self.guesser.propose(row.sampler.history.tokens, count) if count > 0 else []

    def _check(self, row: Row, logits: Logits, guess: list[int]) -> list[StreamEvent]:
        """Chooses from the logits ``[1 + guesses, V]`` until a choice is not the guess, and forgets the wrong guesses."""
        events = []
        for position in range(len(guess) + 1):
            events.append(row.take(logits[position]))
            if row.finished or position == len(guess) or events[-1].token != guess[position]:
                break
        accepted = len(events) - 1
        self.governor.checked(len(guess), accepted, self.took)
        self.recorder.drafted_tokens += len(guess)
        self.recorder.accepted_tokens += accepted
        if accepted < len(guess):
            self.session.truncate(self.session.lengths - (len(guess) - accepted))
        return events

    def _closing(self, events: list[StreamEvent]) -> Iterator[StreamEvent]:
        stats = self.recorder.finish()
        yield from events[:-1]
        last = events[-1]
        yield StreamEvent(last.row, last.token, last.text, last.logprob, last.top_logprobs, last.finish_reason, stats)

    def _read_prompts(self) -> Logits:
        """Logits ``[rows, V]`` after every prompt; each prompt is read once."""
        session, request, recorder = self.session, self.request, self.recorder
        prompts, answers = request.prompts, request.options.num_return_sequences
        capacity = max(map(len, prompts)) + request.max_new_tokens
        recorder.prompt_tokens = sum(map(len, prompts))
        reused = self._reusable()
        began = time.perf_counter()
        if reused:
            session.truncate([reused])
            session.reserve(capacity)
            logits = session.extend([prompts[0][reused:]])
            recorder.reused_tokens = reused
        else:
            lengths = [len(prompt) for prompt in prompts]
            ids = np.zeros((len(prompts), max(lengths)), np.int64)
            for row, prompt in zip(ids, prompts, strict=True):
                row[: len(prompt)] = prompt
            logits = session.prefill(ids, lengths, capacity=capacity)
        if answers > 1:
            rows = np.repeat(np.arange(len(prompts)), answers)
            session.select(rows)
            logits = logits[rows]
        recorder.ran_prefill(began)
        recorder.kv_bytes = session.kv_bytes
        return logits

    def _reusable(self) -> int:
        """How many cached tokens the prompt begins with, if they may be used; at least one token is always read."""
        wish = self.request.options.reuse_prefix
        if not (self.request.conversation if wish is None else wish):
            return 0
        session, prompts = self.session, self.request.prompts
        if len(prompts) > 1 or session.batch != 1:
            return 0
        cached, prompt = session.cached_tokens[0], prompts[0]
        common = 0
        for ours, theirs in zip(cached, prompt[:-1], strict=False):
            if ours != theirs:
                break
            common += 1
        return 0 if session.recurrent and common < len(cached) else common
