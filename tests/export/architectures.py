"""The parity sweep: does an exported model answer like transformers, for every architecture of tests/tiny.py?

One architecture is swept like this. The tiny model is saved, exported, opened, and given ragged right-padded prompts that
differ in shape from any export sample; then at least 12 tokens, the same for both sides, are decoded one by one, past every
window and past the length at which a rotary table changes. Padding holds real ids, never the pad id, so a leak shows.
Every position's logits are compared, never only their argmax:

    error = max |candidate - reference| / (max reference - min reference)

The reference is transformers in float32, each row alone and unpadded. Where the model is a function of its tokens, that is
one forward over prompt and continuation. Two kinds of rotary tables depend on the length of the sequence: for ``longrope``
the forward is repeated at each length (transformers' ``generate`` drops its cache at the switch, with the same result);
for ``dynamic`` the table grows while decoding and cached keys keep their rotation, so the reference decodes with a cache.

Target ``onnx`` is held to more: operators of the standard only, ``onnx.checker`` with shape inference, and the same answers
from the ONNX reference evaluator, on a ragged prompt and one decode step.

    python -m tests.export.architectures [--target ort onnx] [--more] [--jobs 2] [--json out.json] [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tests import budgets, tiny

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Row:
    """One prompt and the tokens that are decoded after it, whatever the model would choose."""

    prompt: tuple[int, ...]
    forced: tuple[int, ...]


class SweptSession(Protocol):
    """What the sweep needs of a session."""

    def reset(self) -> None: ...

    def prefill(self, input_ids: Array, lengths: Array, logits: str = "last") -> Array: ...

    def decode(self, token_ids: Array) -> Array: ...


STEPS = 14
LENGTHS = (11, 4, 13)
SWITCH_LENGTHS = (59, 70, 20)  # one row crosses position 64 while decoding, one starts beyond it, one stays below


def make_rows(lengths: Sequence[int] = LENGTHS, steps: int = STEPS, vocab: int = tiny.VOCAB, seed: int = 0) -> list[Row]:
    """Seeded rows; the ids leave out the special ones."""
    rng = np.random.default_rng(seed)
    return [Row(tuple(rng.integers(4, vocab, n).tolist()), tuple(rng.integers(4, vocab, steps).tolist())) for n in lengths]


def rows_for(name: str) -> list[list[Row]]:
    """The batches an architecture is swept with: always a ragged one and a single row, and one that crosses a rope switch."""
    batches = [make_rows(), make_rows((6,), seed=1)]
    if rope_kind(tiny.config(name)) in ("longrope", "dynamic"):
        batches.append(make_rows(SWITCH_LENGTHS, seed=2))
    return batches


def rope_kind(config: Any) -> str:
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")


# ---------------------------------------------------------------------------------------------------- reference


def reference_logits(model: Any, rows: Sequence[Row]) -> list[Array]:
    """transformers' logits of every prompt and decoded position, each row alone: one ``[n + steps, V]`` float32 per row."""
    kind = rope_kind(model.config)
    by_kind = {"longrope": _each_length, "dynamic": _cached}
    with torch.no_grad():
        return [by_kind.get(kind, _one_forward)(model, row) for row in rows]


def _one_forward(model: Any, row: Row) -> Array:
    return _logits(model(input_ids=torch.tensor([row.prompt + row.forced]), use_cache=False))


def _each_length(model: Any, row: Row) -> Array:
    tokens, first = row.prompt + row.forced, len(row.prompt)
    parts = [_logits(model(input_ids=torch.tensor([tokens[:first]]), use_cache=False))]
    parts += [
        _logits(model(input_ids=torch.tensor([tokens[: n + 1]]), use_cache=False))[-1:] for n in range(first, len(tokens))
    ]
    return np.concatenate(parts)


def _cached(model: Any, row: Row) -> Array:
    model(input_ids=torch.tensor([row.prompt[:1]]))  # a dynamic table remembers the longest sequence until it sees a short one
    output = model(input_ids=torch.tensor([row.prompt]), use_cache=True)
    parts, cache = [_logits(output)], output.cache
    for token in row.forced:
        output = model(input_ids=torch.tensor([[token]]), cache=cache, use_cache=True)
        parts.append(_logits(output))
    return np.concatenate(parts)


def _logits(output: Any) -> Array:
    return output.logits[0].float().numpy()


def self_error(model: Any, rows: Sequence[Row]) -> float:
    """How far transformers' cached decoding is from its own uncached forward: the noise floor of any comparison with it."""
    with torch.no_grad():
        pairs = [(_one_forward(model, row), _cached(model, row)) for row in rows]
    return max(relative_error(uncached, cached) for uncached, cached in pairs)


# ---------------------------------------------------------------------------------------------------- candidate


def session_logits(session: SweptSession, rows: Sequence[Row], all_positions: bool = True) -> list[Array]:
    """The candidate's logits in the shape of :func:`reference_logits`.

    Without ``all_positions`` the prompt gives only its last position, so the rows are ``[1 + steps, V]``.
    """
    ids, lengths = right_padded([row.prompt for row in rows])
    session.reset()
    if all_positions:
        full = session.prefill(ids, lengths, "all")
        parts = [[full[b, :n]] for b, n in enumerate(lengths)]
    else:
        last = session.prefill(ids, lengths).copy()
        parts = [[last[b : b + 1]] for b in range(len(rows))]
    for step in range(len(rows[0].forced)):
        logits = session.decode(np.array([row.forced[step] for row in rows], dtype=np.int64))
        for b in range(len(rows)):
            parts[b].append(logits[b : b + 1].copy())
    return [np.concatenate(p).astype(np.float32) for p in parts]


def right_padded(prompts: Sequence[Sequence[int]], filler: int = 77) -> tuple[Array, Array]:
    """``[B, S]`` ids and ``[B]`` lengths; padding is an ordinary token, which a correct candidate never looks at."""
    lengths = np.array([len(p) for p in prompts], dtype=np.int64)
    ids = np.full((len(prompts), int(lengths.max())), filler, dtype=np.int64)
    for b, prompt in enumerate(prompts):
        ids[b, : len(prompt)] = prompt
    return ids, lengths


def relative_error(reference: Array, candidate: Array, span: float | None = None) -> float:
    """Largest difference over the reference's range (or ``span``); infinite if not finite or of another shape."""
    if reference.shape != candidate.shape or not np.isfinite(candidate).all():
        return float("inf")
    return float(np.abs(reference - candidate).max() / (span or reference.max() - reference.min()))


@dataclass
class Parity:
    """Relative errors of one candidate on one architecture (the largest over all batches)."""

    prefill: float = 0.0
    decode: float = 0.0
    last_position: float = 0.0  # prefill's default answer against the same position of all
    alone: float = 0.0  # a row alone against the same row in its batch

    @property
    def worst(self) -> float:
        return max(self.prefill, self.decode, self.last_position, self.alone)


def compare(session: SweptSession, reference: Sequence[Array], rows: Sequence[Row], parity: Parity | None = None) -> Parity:
    """Judges ``session`` on one batch; with ``parity`` the maxima are carried on."""
    parity = parity or Parity()
    batch = session_logits(session, rows)
    for row, want, got in zip(rows, reference, batch, strict=True):
        first, span = len(row.prompt), float(want.max() - want.min())
        parity.prefill = max(parity.prefill, relative_error(want[:first], got[:first], span))
        parity.decode = max(parity.decode, relative_error(want[first:], got[first:], span))
    for got, short, row in zip(batch, session_logits(session, rows, all_positions=False), rows, strict=True):
        parity.last_position = max(parity.last_position, relative_error(got[len(row.prompt) - 1 :], short))
    if len(rows) > 1:
        for got, row in zip(batch, rows, strict=True):
            parity.alone = max(parity.alone, relative_error(got, session_logits(session, [row])[0]))
    return parity


# ---------------------------------------------------------------------------------------------------- the sweep


@dataclass
class Swept:
    """What the sweep found out about one architecture on one target."""

    name: str
    target: str
    status: str  # ok, wrong, refused, failed
    parity: Parity = field(default_factory=Parity)
    evaluator: float = 0.0  # error of the ONNX reference evaluator (target onnx)
    self_error: float = 0.0
    logit_range: float = 0.0
    message: str = ""
    where: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Subject:
    """One architecture as the sweep sees it: the saved tiny model and transformers' answers."""

    name: str
    checkpoint: Path
    batches: list[list[Row]]
    references: list[list[Array]]
    self_error: float


TARGETS = ("ort", "onnx")
EVALUATED = (5, 3)  # prompt lengths of the reference evaluator's batch


def subject(name: str, directory: Path) -> Subject:
    """Builds, saves and asks transformers; the last batch is the reference evaluator's."""
    model = tiny.build(name)
    batches = [*rows_for(name), make_rows(EVALUATED, steps=1, seed=3)]
    references = [reference_logits(model, rows) for rows in batches]
    return Subject(name, tiny.save(name, directory / "checkpoint"), batches, references, self_error(model, batches[0]))


def sweep_one(name: str, targets: Sequence[str] = ("ort",), **export_options: Any) -> list[Swept]:
    """Saves, exports, opens and compares one architecture on each target; an error becomes a status, with the frames it came
    from."""
    results = [Swept(name, target, "failed") for target in targets]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        shared: list[Subject] = []
        for result in results:
            started = time.monotonic()
            try:
                if not shared:
                    shared.append(subject(name, Path(scratch)))
                _sweep(result, shared[0], Path(scratch) / result.target, export_options)
            except Exception as error:
                _failed(result, error)
            result.seconds = round(time.monotonic() - started, 1)
    return results


def _failed(result: Swept, error: BaseException) -> None:
    from optkit.errors import UnsupportedError

    cause = error
    while cause.__cause__ is not None and not isinstance(cause, UnsupportedError):
        cause = cause.__cause__
    result.status = "refused" if isinstance(cause, UnsupportedError) else "failed"
    result.message = f"{type(cause).__name__}: {' '.join(str(cause).split())[:600]}"
    frames = traceback.extract_tb(cause.__traceback__)
    result.where = [f"{Path(f.filename).parent.name}/{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames[-6:]]


def _sweep(result: Swept, made: Subject, artifact: Path, export_options: dict[str, Any]) -> None:
    import optkit

    result.logit_range = max(float(r.max() - r.min()) for r in made.references[0])
    result.self_error = made.self_error
    options = {"target": result.target, "max_seq_len": 128, **export_options}
    optkit.export(str(made.checkpoint), options, str(artifact))
    result.facts = artifact_facts(artifact)
    session = optkit.open_session(str(artifact))
    for rows, reference in zip(made.batches[:-1], made.references[:-1], strict=True):
        compare(session, reference, rows, result.parity)
    if result.target == "onnx":
        result.evaluator = standard_error(artifact, made.batches[-1], made.references[-1])
    result.status = "ok" if max(result.parity.worst, result.evaluator) <= budgets.EXPORT_RELATIVE_ERROR else "wrong"


def standard_error(artifact: Path, rows: Sequence[Row], reference: Sequence[Array]) -> float:
    """Checks a portable graph against the standard alone; the error of the reference evaluator on a prompt and one step.

    Raises:
        onnx.checker.ValidationError: the graph does not follow the standard.
        ValueError: an operator of another domain.
    """
    import onnx
    from onnx.reference import ReferenceEvaluator

    from optkit.export.verify import Runner
    from optkit.io_spec import GraphSpec

    facts = json.loads((artifact / "optkit.json").read_text(encoding="utf-8"))["facts"]
    path = artifact / facts["model_file"]
    onnx.checker.check_model(str(path), full_check=True)
    foreign = {node.domain for node in onnx.load(path, load_external_data=False).graph.node} - {"", "ai.onnx"}
    if foreign:
        raise ValueError(f"operators of {', '.join(sorted(foreign))} in a portable graph")
    spec = GraphSpec.from_dict(facts["graph"])
    run = Runner(ReferenceEvaluator(str(path)), spec, len(rows), capacity=8)
    width = max(len(row.prompt) for row in rows)
    with np.errstate(over="ignore"):  # a mask of the lowest number added to another: minus infinity, as in torch
        logits = run.step([list(row.prompt) for row in rows], list(range(width)))
        after = run.step([list(row.forced) for row in rows], [-1])
    errors = []
    for index, (row, want) in enumerate(zip(rows, reference, strict=True)):
        first = width - len(row.prompt) if spec.layout == "growing" else 0
        got = np.concatenate([logits[index, first : first + len(row.prompt)], after[index, -1:]])
        errors.append(relative_error(want, got))
    return max(errors)


# Operators that say how a layer was written; everything else is glue.
TELLING = (
    *("GroupQueryAttention", "Attention", "TensorScatter", "LinearAttention", "CausalConvWithState", "Scan", "MoE", "QMoE"),
    *("RotaryEmbedding", "SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "Softmax"),
)


def artifact_facts(directory: Path) -> dict[str, Any]:
    """How the model was captured, from the manifest, and which telling operators its graph has."""
    import onnx

    facts = json.loads((directory / "optkit.json").read_text(encoding="utf-8"))["facts"]
    nodes = Counter(node.op_type for node in onnx.load(directory / facts["model_file"], load_external_data=False).graph.node)
    return {
        "layout": facts["graph"]["layout"],
        "layout_reason": facts.get("layout_reason", ""),
        "rope_switch": facts["graph"].get("rope_switch"),
        "states": sorted({c["role"] for c in facts["graph"]["caches"]} - {"key", "value"}),
        "tiers": facts["tiers"],
        "nodes": nodes.total(),
        "operators": {name: nodes[name] for name in TELLING if nodes[name]},
        "within_size": facts["audit"]["bytes"]["within_limit"],
        "unread": facts["audit"]["tensors"]["not_read_by_forward"],
    }


def sweep(names: Sequence[str], targets: Sequence[str] = TARGETS, jobs: int = 2, timeout: float = 600.0) -> list[Swept]:
    """Sweeps ``names`` in ``jobs`` processes; a crash or time-out of one architecture is that architecture's result."""
    context = multiprocessing.get_context("spawn")
    results: list[Swept] = []
    with context.Pool(jobs, maxtasksperchild=40) as pool:
        pending = {name: pool.apply_async(sweep_one, (name, targets)) for name in names}
        for name, handle in pending.items():
            try:
                found = handle.get(timeout)
            except multiprocessing.TimeoutError:
                found = [Swept(name, target, "failed", message=f"no result within {timeout:.0f} s") for target in targets]
            results += found
            for one in found:
                print(line_of(one), flush=True)
    return results


def line_of(result: Swept) -> str:
    p = result.parity
    tail = result.message or f"prefill {p.prefill:.1e} decode {p.decode:.1e} last {p.last_position:.1e} alone {p.alone:.1e}"
    tail += f" evaluator {result.evaluator:.1e}" if result.target == "onnx" and not result.message else ""
    head = f"{result.name:18s} {result.target:5s} {result.status:8s} {result.seconds:5.1f}s"
    return f"{head}  {tail}" + "".join(f"\n    {w}" for w in result.where)


def main(arguments: Sequence[str] | None = None) -> int:
    from tests.tiny_more import MORE

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--target", nargs="+", default=list(TARGETS))
    parser.add_argument("--more", action="store_true", help="the architectures of tests/tiny_more.py as well")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    names = options.names or [*tiny.ARCHITECTURES, *(MORE if options.more else ())]
    results = sweep(names, options.target, options.jobs)
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=1), encoding="utf-8")
    good = sum(r.status == "ok" for r in results)
    bad = [f"{r.name} ({r.target}) {r.status}" for r in results if r.status != "ok"]
    print(f"{good} of {len(results)} ok" + "".join(f"; {b}" for b in bad))
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
