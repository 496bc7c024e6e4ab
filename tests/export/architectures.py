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

    python -m tests.export.architectures [--target ort] [--jobs 2] [--json out.json] [NAME ...]
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
    """What the sweep found out about one architecture."""

    name: str
    target: str
    status: str  # ok, wrong, refused, failed
    parity: Parity = field(default_factory=Parity)
    self_error: float = 0.0
    logit_range: float = 0.0
    message: str = ""
    where: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def sweep_one(name: str, target: str = "ort", directory: str | Path | None = None, **export_options: Any) -> Swept:
    """Saves, exports, opens and compares one architecture; an error becomes a status, with the frames it came from."""
    started = time.monotonic()
    result = Swept(name, target, "failed")
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            _sweep(result, Path(directory or scratch), export_options)
    except Exception as error:
        from optkit.errors import UnsupportedError

        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, UnsupportedError):
            cause = cause.__cause__
        result.status = "refused" if isinstance(cause, UnsupportedError) else "failed"
        result.message = f"{type(cause).__name__}: {' '.join(str(cause).split())[:600]}"
        frames = traceback.extract_tb(cause.__traceback__)
        result.where = [f"{Path(f.filename).parent.name}/{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames[-6:]]
    result.seconds = round(time.monotonic() - started, 1)
    return result


def _sweep(result: Swept, directory: Path, export_options: dict[str, Any]) -> None:
    import optkit

    model = tiny.build(result.name)
    batches = rows_for(result.name)
    references = [reference_logits(model, rows) for rows in batches]
    result.logit_range = max(float(r.max() - r.min()) for r in references[0])
    result.self_error = self_error(model, batches[0])
    checkpoint, artifact = tiny.save(result.name, directory / "checkpoint"), directory / "artifact"
    options = {"target": result.target, "max_seq_len": 128, **export_options}
    optkit.export(str(checkpoint), options, str(artifact))
    result.facts = artifact_facts(artifact)
    session = optkit.open_session(str(artifact))
    for rows, reference in zip(batches, references, strict=True):
        compare(session, reference, rows, result.parity)
    result.status = "ok" if result.parity.worst <= budgets.EXPORT_RELATIVE_ERROR else "wrong"


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
    }


def sweep(names: Sequence[str], target: str = "ort", jobs: int = 2, timeout: float = 300.0) -> list[Swept]:
    """Sweeps ``names`` in ``jobs`` processes; a crash or time-out of one architecture is that architecture's result."""
    context = multiprocessing.get_context("spawn")
    results: dict[str, Swept] = {}
    with context.Pool(jobs, maxtasksperchild=40) as pool:
        pending = {name: pool.apply_async(sweep_one, (name, target)) for name in names}
        for name, handle in pending.items():
            try:
                results[name] = handle.get(timeout)
            except multiprocessing.TimeoutError:
                results[name] = Swept(name, target, "failed", message=f"no result within {timeout:.0f} s")
            print(line_of(results[name]), flush=True)
    return [results[name] for name in names]


def line_of(result: Swept) -> str:
    p = result.parity
    tail = result.message or f"prefill {p.prefill:.1e} decode {p.decode:.1e} last {p.last_position:.1e} alone {p.alone:.1e}"
    return f"{result.name:18s} {result.status:8s} {result.seconds:5.1f}s  {tail}" + "".join(f"\n    {w}" for w in result.where)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--target", default="ort")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    results = sweep(options.names or list(tiny.ARCHITECTURES), options.target, options.jobs)
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=1), encoding="utf-8")
    good = sum(r.status == "ok" for r in results)
    print(f"{good} of {len(results)} ok; " + ", ".join(f"{r.name} {r.status}" for r in results if r.status != "ok"))
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
