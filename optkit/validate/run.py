"""The ``validate`` stage: does the candidate answer like the reference?

1. open both as sessions (a path is opened, a session is used as it is);
2. cut cases out of real text, and compare every step under teacher forcing (``cases.py``, ``parity.py``);
3. greedy decoding in lockstep, perplexity of both on the same windows;
4. hold the numbers against the limits and write the report.

The reference is the checkpoint in torch: its FP16 (or BF16) weights, computed in float32 on the CPU, so that the reference's
own rounding is small. How small is measured: the same reference is run again in float64 on a few steps, and the report
states that noise floor beside the errors. An **unquantized** export is judged by the logit error relative to the logit range
(default limit 1e-5, or four times the noise floor if that is more) and by greedy tokens; a **quantized** one by KL, top-1
agreement and perplexity, and, given the quantized checkpoint, its export step is judged by itself: same numbers, other kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from optkit.manifest import library_versions
from optkit.recipe import Limits, ValidateRecipe
from optkit.validate import sides
from optkit.validate.cases import Case
from optkit.validate.compare import Comparer
from optkit.validate.report import Report, write_report

VERSIONS = ("numpy", "onnxruntime", "torch", "transformers", "tokenizers")

Progress = Callable[..., None]


def validate(
    candidate: str | Path | Any,
    reference: str | Path | Any,
    cases: Sequence[Case] | None = None,
    limits: Limits | Mapping[str, float] | None = None,
    report_dir: str | Path | None = None,
    *,
    settings: ValidateRecipe | None = None,
    checkpoint: str | Path | Any | None = None,
    checkpoint_limits: Limits | None = None,
    backend: str | None = None,
    threads: int | None = None,
    long_steps: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Compares ``candidate`` with ``reference``. Exceeding a limit does not raise: see ``Report.passed``.

    Args:
        candidate, reference: an artifact, a checkpoint (HF directory, hub id, GGUF file; run in torch) or an open session.
        cases: what to compare; by default cut out of ``settings.text``.
        limits: by default those of ``settings``, and for an unquantized candidate the tight ones described above.
        report_dir: where ``report.json``, ``report.md`` and ``report.html`` go.
        settings: how much is compared.
        checkpoint: the quantized checkpoint the candidate was exported from; compared as well, with ``checkpoint_limits``.
        backend, threads: of the candidate.
        long_steps: also one row of this many steps.
        progress: called with ``(text, done, total)``.

    Raises:
        ArtifactError, CheckpointError: one of them cannot be opened.
        UsageError: not the same vocabulary, or too little text.
    """
    started = time.monotonic()
    settings = settings or ValidateRecipe()
    if isinstance(limits, Mapping):
        limits = Limits(**limits)
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(sides.opened(candidate, backend, threads))
        facts = sides.describe(candidate, ours)
        comparer = Comparer(settings, ours, facts, cases, long_steps, progress)
        theirs = stack.enter_context(sides.opened(reference, None, threads))
        comparisons = [comparer.compare("Against the reference", theirs, reference, limits or settings.limits)]
        if checkpoint is not None:
            theirs = stack.enter_context(sides.opened(checkpoint, None, threads))
            title = "The export step: against the quantized checkpoint in torch"
            comparisons.append(comparer.compare(title, theirs, checkpoint, checkpoint_limits or Limits(), whole=False))
    report = Report(
        candidate=facts,
        settings={**dataclasses.asdict(settings), "long_steps": long_steps},
        comparisons=comparisons,
        notes=comparer.notes,
        versions=library_versions(*VERSIONS),
        seconds=time.monotonic() - started,
    )
    if report_dir is not None:
        write_report(report, report_dir)
    return report
