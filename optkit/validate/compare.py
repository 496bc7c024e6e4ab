"""One candidate beside one reference: runs the cases, greedy decoding and perplexity, and makes a :class:`Comparison` of it.

Order of the work, and its cost for a model that takes ``t`` per decode step on the slower side: the cases take
``3 (N + 1) t`` for N decode steps, greedy decoding ``2 G t`` for two prompts of G tokens, perplexity one prefill per window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from optkit.errors import UsageError
from optkit.recipe import Limits, ValidateRecipe
from optkit.validate import metrics, parity, sides
from optkit.validate.cases import Case, IntArray, make_cases, needed_tokens, random_tokens, text_tokens, windows
from optkit.validate.metrics import FloatArray
from optkit.validate.report import Check, Comparison, Metric

UNQUANTIZED_LOGIT_ERROR = 1e-5  # of the logit range; float32 kernels of a 30-layer model differ by a tenth of it
NOISE_FACTOR = 4.0  # a correct other kernel has a rounding error of the same size as the reference's own
NOISE_STEPS = 8  # steps of the reference in float64; its noise does not grow with the step
GREEDY_PROMPTS = 2
REPEAT_LIMIT = 16  # one token this often in a row, where the reference does not do it, is a broken model
UNITS = {
    "kl_mean": ("nats", "at most"),
    "kl_max": ("nats", "at most"),
    "top1_agreement": ("share", "at least"),
    "perplexity_delta": ("relative", "at most"),
    "logit_error": ("of range", "at most"),
    "greedy_match": ("share", "at least"),
}

Progress = Callable[..., None]


class Comparer:
    """Holds what both comparisons of a validation share: the candidate, the cases, the text."""

    def __init__(
        self,
        settings: ValidateRecipe,
        candidate: Any,
        facts: Mapping[str, Any],
        cases: Sequence[Case] | None = None,
        long_steps: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self.settings = settings
        self.candidate = candidate
        self.facts = facts
        self.notes: list[str] = []
        self._tell: Progress = progress or (lambda *_: None)
        self.tokens, self.is_text = self._read_tokens(long_steps)
        s = settings
        self.cases = (
            list(cases)
            if cases is not None
            else make_cases(self.tokens, s.rows, s.prompt_tokens, s.decode_steps, long_steps, s.seed)
        )
        if not self.cases:
            raise UsageError("validate: no case to compare")

    def _read_tokens(self, long_steps: int) -> tuple[IntArray, bool]:
        """Ids of the text, or seeded random ids for a model without a tokenizer."""
        s = self.settings
        count = max(s.perplexity_tokens, needed_tokens(s.rows, s.prompt_tokens, s.decode_steps, long_steps))
        encode = sides.encoder(self.candidate)
        if encode is not None and s.text != "random":
            return text_tokens(s.text, encode, count), True
        self.notes.append("Compared on seeded random token ids, not on text, so perplexity was not measured.")
        return random_tokens(sides.vocab_size(self.candidate), count, s.seed), False

    def compare(self, title: str, reference: Any, name: Any, limits: Limits, whole: bool = True) -> Comparison:
        """Everything measured against ``reference``; ``whole=False`` only what is measured on the cases."""
        result = Comparison(title, sides.describe(name, reference))
        found = self._run_cases(reference, limits.near_tie_nats)
        self._add_cases(result, found)
        if whole or limits.greedy_match is not None:
            self._add_greedy(result, reference, limits.near_tie_nats)
        if whole:
            self._add_noise(result, name, reference)
            if self.is_text and self.settings.perplexity_tokens:
                self._add_perplexity(result, reference)
        self._add_checks(result, found, limits)
        return result

    def _run_cases(self, reference: Any, near_tie_nats: float) -> list[parity.CaseResult]:
        total, done = sum(case.steps + 1 for case in self.cases), 0

        def tick(_: str) -> None:
            nonlocal done
            done += 1
            self._tell("comparing step by step", done, total)

        return [parity.compare_case(reference, self.candidate, case, near_tie_nats, tick) for case in self.cases]

    def _add_cases(self, result: Comparison, found: Sequence[parity.CaseResult]) -> None:
        kl = np.concatenate([r.kl.reshape(-1) for r in found])
        error = np.concatenate([r.error.reshape(-1) for r in found])
        agrees = np.concatenate([r.agrees.reshape(-1) for r in found])
        same = np.concatenate([r.same_choice.reshape(-1) for r in found])
        positions = f"{len(kl)} positions"
        result.metrics += [
            Metric("kl_mean", float(kl.mean()), "nats", "KL divergence, mean", positions),
            Metric("kl_max", float(kl.max()), "nats", "KL divergence, largest"),
            Metric("kl_p99", float(np.percentile(kl, 99)), "nats", "KL divergence, 99th percentile"),
            Metric("top1_agreement", float(agrees.mean()), "share", "Top-1 agreement", "near ties counted as same"),
            Metric("top1_exact", float(same.mean()), "share", "Top-1 agreement, near ties counted as different"),
            Metric("logit_error", float(error.max()), "of range", "Logit error, largest", "over the reference's logit range"),
            Metric(
                "logit_error_p50", float(np.percentile(error, 50)), "of range", "Logit error, median of the positions' largest"
            ),
        ]
        result.cases = [
            {
                "name": r.case.name,
                "lengths": r.case.lengths.tolist(),
                "steps": r.case.steps,
                "kl_mean": float(r.kl.mean()),
                "kl_max": float(r.kl.max()),
                "top1_agreement": float(r.agrees.mean()),
                "logit_error": float(r.error.max()),
            }
            for r in found
        ]
        steps = max(r.kl.shape[1] for r in found)
        columns = [np.concatenate([r.kl[:, i] for r in found if i < r.kl.shape[1]]) for i in range(steps)]
        result.series = {
            "kl_by_step_mean": [float(c.mean()) for c in columns],
            "kl_by_step_max": [float(c.max()) for c in columns],
            "logit_errors": [float(e) for e in error],
        }

    def _add_greedy(self, result: Comparison, reference: Any, near_tie_nats: float) -> None:
        steps = self.settings.greedy_tokens
        if not steps:
            return
        prompts = self._greedy_prompts()
        total, done = steps * len(prompts), 0

        def tick(_: str) -> None:
            nonlocal done
            done += 1
            self._tell("greedy decoding side by side", done, total)

        found = [parity.compare_greedy(reference, self.candidate, prompt, steps, near_tie_nats, tick) for prompt in prompts]
        matched, ties = sum(r.matched for r in found), sum(r.near_ties for r in found)
        note = f"{matched} of {total} tokens before the first difference, {ties} near ties among them"
        result.metrics.append(Metric("greedy_match", matched / total, "share", "Greedy tokens matched", note))
        result.greedy = [
            {
                "steps": r.steps,
                "matched": r.matched,
                "near_ties": r.near_ties,
                "reference": r.reference,
                "candidate": r.candidate,
            }
            for r in found
        ]

    def _greedy_prompts(self) -> list[IntArray]:
        """Prompts of the cases, longest first: the same legal inputs."""
        rows = [case.input_ids[i, :length] for case in self.cases for i, length in enumerate(case.lengths)]
        return sorted(rows, key=len, reverse=True)[:GREEDY_PROMPTS]

    def _add_noise(self, result: Comparison, name: Any, reference: Any) -> None:
        """The reference's own float32 rounding, from the same weights computed in float64."""
        self._tell("the reference's own rounding error (float64)")
        with sides.in_float64(name, reference) as precise:
            if precise is None:
                return
            case = self.cases[0]
            short = Case(case.name, case.input_ids, case.lengths, case.continuation[:, :NOISE_STEPS])
            noise = parity.compare_case(precise, reference, short, 0.0)
        value = float(noise.error.max())
        result.metrics.append(
            Metric("noise_floor", value, "of range", "The reference's own float32 error", "largest, against itself in float64")
        )

    def _add_perplexity(self, result: Comparison, reference: Any) -> None:
        pieces = windows(self.tokens, self.settings.window, self.settings.perplexity_tokens)
        if not pieces:
            return
        ours: list[FloatArray] = []
        theirs: list[FloatArray] = []
        for i, piece in enumerate(pieces):
            self._tell("perplexity", i, len(pieces))
            for session, values in ((reference, theirs), (self.candidate, ours)):
                values.append(metrics.negative_log_likelihood(sides.all_logits(session, piece)[:-1], piece[1:]))
        expected, found = metrics.perplexity(np.concatenate(theirs)), metrics.perplexity(np.concatenate(ours))
        count = sum(len(values) for values in ours)
        note = f"{count} tokens of {self.settings.text} in windows of {self.settings.window}"
        result.metrics += [
            Metric("perplexity_reference", expected, "", "Perplexity of the reference", note),
            Metric("perplexity_candidate", found, "", "Perplexity of the candidate"),
            Metric("perplexity_delta", found / expected - 1.0, "relative", "Perplexity, change"),
        ]

    def _add_checks(self, result: Comparison, found: Sequence[parity.CaseResult], limits: Limits) -> None:
        reasons = {}
        wanted = {name: getattr(limits, name) for name in UNITS}
        if not self.facts.get("quantized", True) and self.facts.get("dtype") == "fp32" and wanted["logit_error"] is None:
            noise = result.value("noise_floor") or 0.0
            wanted["logit_error"] = max(UNQUANTIZED_LOGIT_ERROR, NOISE_FACTOR * noise)
            reasons["logit_error"] = "an unquantized float32 export computes the same numbers with other kernels"
        for name, limit in wanted.items():
            value = result.value(name)
            if limit is None:
                continue
            if value is None:
                raise UsageError(
                    f"limit {name}: not measured with these settings, so not checked; measure it or leave the limit out"
                )
            unit, bound = UNITS[name]
            result.checks.append(Check(name, value, limit, unit, bound, reasons.get(name, "")))
        broken = int(sum((~r.finite).sum() for r in found))
        result.checks.append(Check("non_finite_logits", float(broken), 0.0, "positions", "at most", "NaN or infinite answers"))
        if result.greedy:
            extra: int = max(self._extra_repeats(g["reference"], g["candidate"]) for g in result.greedy)
            reason = "one token over and over, where the reference does not"
            result.checks.append(Check("repeated_token", float(extra), float(REPEAT_LIMIT), "times", "at most", reason))

    @staticmethod
    def _extra_repeats(reference: Sequence[int], candidate: Sequence[int]) -> int:
        """The candidate's longest run of one token, 0 if the reference repeats just as much."""
        ours, theirs = metrics.longest_repeat(candidate), metrics.longest_repeat(reference)
        return ours if ours > theirs else 0
