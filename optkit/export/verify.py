"""The written file, opened in ONNX Runtime, must answer like the untouched model before its directory gets a manifest.

Other sizes than the traced sample: a ragged, right-padded first prompt of two rows with all positions wanted, decode steps of
    both
rows, one row alone (which must not notice that its neighbour is gone), a continued prompt, and the default wanted position. The
reference is the untouched model without cache or padding, so cache, mask, positions and weights are all covered.

Quantized linears are compared at accuracy level 1 (float32 arithmetic), whatever the file ships with: this step judges the
export. What a faster level costs is measured by ``optkit validate``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray

from optkit import io_spec
from optkit.errors import VerificationError
from optkit.export import rounding
from optkit.export.segments import SegmentedSession, tensor_bytes
from optkit.export.trace import PROMPT_LENGTHS, Reference
from optkit.io_spec import EXACT_INT8, GraphSpec

# Largest logit difference over the logits' range. float32: kernels that sum in another order, through 2 to 40 layers.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


# Graphs with more weights than this are run piece by piece (segments.py), and for fewer steps.
WHOLE_BYTES = 1 << 30


def open_exact(path: Path) -> Any:
    """A CPU session over the file with every quantized matmul computing in float32, and no activation rounded."""
    return open_graph(path, exact=True)


def open_graph(path: Path, exact: bool) -> Any:
    """A CPU session over the file, as it ships or ``exact``; one that runs piece by piece where the weights are many.

    Raises:
        VerificationError: ONNX Runtime does not load it.
    """
    model = onnx.load(str(path), load_external_data=False)
    if exact:
        rounding.bypass(model)
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "accuracy_level":
                    attribute.i = min(attribute.i, 1)
    if sum(tensor_bytes(t) for t in model.graph.initializer) > WHOLE_BYTES:
        return SegmentedSession(model, path.parent)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    if rounding.rounded_activations(model):
        options.add_session_config_entry(*EXACT_INT8)
    if exact:
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise VerificationError(
            f"ONNX Runtime {onnxruntime.__version__} does not load the exported graph: {' '.join(str(error).split())[:500]}"
        ) from error


class Runner:
    """The graph with its caches, rows right padded; one instance per batch."""

    def __init__(self, session: Any, spec: GraphSpec, batch: int, capacity: int) -> None:
        self.session, self.spec, self.batch = session, spec, batch
        length = {"growing": 0, "scatter": spec.max_seq_len}.get(spec.layout, capacity)
        dtypes = {"float32": np.float32, "float16": np.float16}
        self.pasts: dict[str, NDArray[Any]] = {c.past: np.zeros(c.sizes(batch, length), dtypes[c.dtype]) for c in spec.caches}
        self.lens = np.zeros(batch, np.int64)
        self.mask = np.zeros((batch, 0), np.int64)  # growing: the columns so far

    def step(self, rows: list[list[int]], positions: list[int] | None = None) -> NDArray[np.float32]:
        """Appends ``rows`` (ragged only on the first call, except in ``chunks``); logits ``[B, N, V]``."""
        feeds = self.feeds(rows, positions)
        logits, *presents = self.session.run([io_spec.LOGITS, *(c.present for c in self.spec.caches)], feeds)
        self.pasts = {c.past: present for c, present in zip(self.spec.caches, presents, strict=True)}
        self.lens = self.lens + np.array([len(row) for row in rows], np.int64)
        return np.asarray(logits, np.float32)

    def feeds(self, rows: list[list[int]], positions: list[int] | None = None) -> dict[str, NDArray[Any]]:
        """What :meth:`step` gives the graph."""
        counts = np.array([len(row) for row in rows], np.int64)
        width = int(counts.max())
        left = self.spec.layout == "growing"
        ids = np.array([[0] * (width - len(r)) + r if left else r + [0] * (width - len(r)) for r in rows], np.int64)
        feeds: dict[str, Any] = {io_spec.INPUT_IDS: ids, **self.where(ids, counts, width), **self.pasts}
        if self.spec.optional_logits_positions and (positions is not None or self.spec.layout == "scatter"):
            feeds[io_spec.LOGITS_POSITIONS] = np.array([-1] if positions is None else positions, np.int64)
        return feeds

    def where(self, ids: NDArray[np.int64], counts: NDArray[np.int64], width: int) -> dict[str, Any]:
        layout = self.spec.layout
        if layout == "chunks":
            return {io_spec.PAST_LENS: self.lens, io_spec.QUERY_LENS: counts}
        if layout == "scatter":
            positions = self.lens[:, None] + np.arange(width)[None]
            return {io_spec.POSITION_IDS: positions, io_spec.WRITE_INDICES: self.lens, io_spec.QUERY_LENS: counts}
        if layout == "growing":
            new = (np.arange(width)[None] >= (width - counts)[:, None]).astype(np.int64)
            self.mask = np.concatenate([self.mask, new], 1)
            return {io_spec.ATTENTION_MASK: self.mask}
        total = self.lens + counts
        return {io_spec.ATTENTION_MASK: (np.arange(total.max())[None] < total[:, None]).astype(np.int64)}


def prompt_feeds(spec: GraphSpec, reference: Reference) -> dict[str, NDArray[Any]]:
    """The inputs of the reference's ragged first prompt."""
    prompts = [row[:n] for row, n in zip(reference.rows, PROMPT_LENGTHS, strict=True)]
    return Runner(None, spec, len(prompts), max(len(row) for row in reference.rows)).feeds(prompts)


def artifact_error(session: Any, spec: GraphSpec, reference: Reference) -> dict[str, float]:
    """Largest logit error, relative to the range of the reference's logits, of each way of running.

    Returns:
        ``prefill``, ``decode``, ``alone`` (a row by itself), ``continued`` (a prompt in two pieces).
    """
    rows, capacity = reference.rows, max(len(row) for row in reference.rows) + 3
    want = [x.numpy() for x in reference.logits]
    errors: dict[str, float] = {}

    def record(kind: str, got: NDArray[np.float32], row: int, position: int) -> None:
        error = float(np.abs(got - want[row][position]).max()) / reference.scale
        errors[kind] = max(errors.get(kind, 0.0), error if np.isfinite(error) else float("inf"))

    both = Runner(session, spec, len(rows), capacity)
    prompts = [row[:n] for row, n in zip(rows, PROMPT_LENGTHS, strict=True)]
    width = max(PROMPT_LENGTHS)
    logits = both.step(prompts, list(range(width)))
    shift = [width - len(p) if spec.layout == "growing" else 0 for p in prompts]
    for index, prompt in enumerate(prompts):
        if logits.shape[1] == 1:  # the layout gives the last token's logits only
            record("prefill", logits[index, 0], index, len(prompt) - 1)
            continue
        for position in range(len(prompt)):
            record("prefill", logits[index, shift[index] + position], index, position)
    steps = min(len(r) - n for r, n in zip(rows, PROMPT_LENGTHS, strict=True))
    for step in range(1 if isinstance(session, SegmentedSession) else steps):
        logits = both.step([[row[n + step]] for row, n in zip(rows, PROMPT_LENGTHS, strict=True)])
        for index, length in enumerate(PROMPT_LENGTHS):
            record("decode", logits[index, -1], index, length + step)
    alone = Runner(session, spec, 1, capacity)
    record("alone", alone.step([rows[0][:-2]])[0, -1], 0, len(rows[0]) - 3)
    record("continued", alone.step([rows[0][-2:]])[0, -1], 0, len(rows[0]) - 1)
    return errors


def verify_onnx(path: Path, spec: GraphSpec, reference: Reference, dtype: torch.dtype) -> dict[str, Any]:
    """Raises VerificationError if the file differs from the model by more than the tolerance; returns the measured errors."""
    errors = artifact_error(open_exact(path), spec, reference)
    limit = TOLERANCE[dtype]
    worst = max(errors, key=lambda kind: errors[kind])
    if not errors[worst] <= limit:
        raise VerificationError(
            f"the exported graph's logits differ from the model's by {errors[worst]:.1e} of their range in {worst} "
            f"(limit {limit:.0e}); "
            f"all: {', '.join(f'{k} {v:.1e}' for k, v in errors.items())}; nothing was written"
        )
    return {
        "logit_error": errors,
        "limit": limit,
        "rows": [len(r) for r in reference.rows],
        "runtime": f"onnxruntime {onnxruntime.__version__}",
    }


def smoke_prompt(path: Path, spec: GraphSpec, prompt: list[int], steps: int) -> dict[str, Any]:
    """A prompt and the greedy tokens the file answers with as it ships, with the margin of each choice in nats: what
    ``optkit validate --smoke`` compares with on another machine. Large models answer with one token."""
    session = open_graph(path, exact=False)
    if isinstance(session, SegmentedSession):
        steps = 1
    steps = min(steps, spec.max_seq_len - len(prompt))
    runner = Runner(session, spec, 1, len(prompt) + max(steps, 1))
    tokens: list[int] = []
    margins: list[float] = []
    row = prompt
    for _ in range(steps):
        logits = runner.step([row])[0, -1]
        second, first = np.partition(logits, -2)[-2:]
        tokens.append(int(logits.argmax()))
        margins.append(round(float(first - second), 6))
        row = [tokens[-1]]
    return {"prompt": prompt, "tokens": tokens, "margins": margins}
