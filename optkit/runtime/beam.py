"""Beam search, with the rules of transformers' ``generate(num_beams=…)``.

Each prompt keeps ``num_beams`` unfinished answers. A step looks at the best ``max(2, 1 + E) * num_beams`` continuations of all
of them (``E`` end-of-sequence tokens): those among the first ``num_beams`` that end are completed with the score
``sum of log-probabilities / length ** length_penalty``, and the best that do not end go on. A prompt is done when no
unfinished answer, at its present length, could beat the worst of ``num_beams`` completed ones; with ``early_stopping``, as
soon as there are that many. The cache follows through ``Session.select``: a beam that splits is copied, one that dies is
dropped.

Stop strings do not end a beam; they cut the text of the answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from optkit.runtime.generate import Answer, GenerationResult
from optkit.runtime.options import Request
from optkit.runtime.sampling import Logits, RowSampler, log_softmax
from optkit.runtime.stats import Recorder

if TYPE_CHECKING:
    from optkit.runtime.base import Session


@dataclass
class _Beam:
    """An unfinished answer; ``slot`` is its row in the session."""

    slot: int
    tokens: list[int] = field(default_factory=list)
    score: float = 0.0


class _Group:
    """The beams of one prompt."""

    def __init__(self, request: Request, number: int) -> None:
        self._request = request
        self.number = number
        self.running = [_Beam(slot=number)]
        self.completed: list[tuple[float, list[int]]] = []  # best first
        self._width = request.options.num_beams

    def step(self, logits: Logits) -> None:
        """Replaces the running beams by the best continuations; ``logits [rows, V]`` are the session's."""
        options, eos = self._request.options, self._request.eos
        scores = np.stack([self._scores(beam, logits[beam.slot]) for beam in self.running])
        keep = min(max(2, 1 + len(eos)) * self._width, scores.size)
        flat = scores.ravel()
        best = np.argpartition(-flat, keep - 1)[:keep]
        best = best[np.argsort(-flat[best], kind="stable")]
        length = len(self.running[0].tokens) + 1
        at_limit = length == self._request.max_new_tokens
        going_on: list[_Beam] = []
        for rank, index in enumerate(best.tolist()):
            parent, token = divmod(index, scores.shape[1])
            beam = _Beam(self.running[parent].slot, [*self.running[parent].tokens, token], float(flat[index]))
            if at_limit or token in eos:
                if rank < self._width:
                    self.completed.append((beam.score / length**options.length_penalty, beam.tokens))
            elif len(going_on) < self._width:
                going_on.append(beam)
        self.completed = sorted(self.completed, key=lambda answer: -answer[0])[: self._width]
        self.running = [] if at_limit or self._done(going_on, length) else going_on

    def _scores(self, beam: _Beam, logits: Logits) -> Logits:
        logp = log_softmax(logits)
        request = self._request
        if not request.sampling.plain or request.options.logits_processors:
            sampler = RowSampler(
                request.sampling,
                request.prompts[self.number],
                sorted(request.eos),
                row=self.number,
                processors=request.options.logits_processors,
            )
            for token in beam.tokens:
                sampler.append(token)
            logp = sampler.process(logp)
        return logp + np.float32(beam.score)

    def _done(self, going_on: list[_Beam], length: int) -> bool:
        options = self._request.options
        if not going_on:
            return True
        if len(self.completed) < self._width:
            return False
        return options.early_stopping or going_on[0].score / length**options.length_penalty <= self.completed[-1][0]


def beam_search(session: Session, request: Request, recorder: Recorder) -> GenerationResult:
    """The ``num_return_sequences`` best answers to each prompt, best first."""
    groups = [_Group(request, number) for number in range(len(request.prompts))]
    lengths = [len(prompt) for prompt in request.prompts]
    ids = np.zeros((len(lengths), max(lengths)), np.int64)
    for row, prompt in zip(ids, request.prompts, strict=True):
        row[: len(prompt)] = prompt
    recorder.prompt_tokens = sum(lengths)
    began = time.perf_counter()
    logits = session.prefill(ids, lengths, capacity=max(lengths) + request.max_new_tokens)
    recorder.ran_prefill(began)
    while True:
        for group in groups:
            if group.running:
                group.step(logits)
        beams = [beam for group in groups for beam in group.running]
        recorder.chose(len(beams))
        if not beams:
            break
        session.select([beam.slot for beam in beams])
        for slot, beam in enumerate(beams):
            beam.slot = slot
        began = time.perf_counter()
        logits = session.decode(np.array([beam.tokens[-1] for beam in beams], np.int64), copy=False)
        recorder.ran_decode(began)
        recorder.kv_bytes = max(recorder.kv_bytes, session.kv_bytes)
    wanted = request.options.num_return_sequences
    answers = [
        _answer(session, request, group.number * wanted + place, group.number, *group.completed[place])
        for group in groups
        for place in range(min(wanted, len(group.completed)))
    ]
    return GenerationResult(answers, recorder.finish())


def _answer(session: Session, request: Request, row: int, prompt: int, score: float, tokens: list[int]) -> Answer:
    answer = Answer(row, prompt, request.seeds[0][0], tokens, score=score)
    answer.finish_reason = "eos" if tokens[-1] in request.eos else "length"
    if session.has_tokenizer:
        answer.text = session.tokenizer.decode(tokens, request.options.skip_special_tokens)
        found = [(at, stop) for stop in request.stops if (at := answer.text.find(stop)) >= 0]
        if found:
            at, answer.stop = min(found)
            answer.text, answer.finish_reason = answer.text[:at], "stop"
    return answer
