"""A model -> one captured program with explicit inputs: the wrapper, the eager plan, ``torch.export``.

``prepare`` replaces what can be proven equal (substitute.py), runs the model once with our functions on real tensors, compares the
logits with the untouched model's, and decides per layer how its attention is captured. ``capture`` then traces it once with
symbolic batch, sequence, total and capacity sizes. The sample has a padded row and sizes that are all different, so that
nothing is specialised to them; run it again at other sizes to be sure (verify.py does).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from optkit import io_spec
from optkit.errors import UnsupportedError, VerificationError
from optkit.export import hooks, substitute
from optkit.export.provenance import Capture, Plan, Tokens, chunk_tokens, growing_tokens, scatter_tokens, slots_tokens
from optkit.export.weights import Weights
from optkit.io_spec import CacheSpec, GraphSpec

# The probe compares the prepared model with the model as it was, both in eager torch: other kernels, same numbers.
PROBE_TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
_NUMPY_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass
class Prepared:
    """A model ready to be traced.

    Attributes:
        wrapper: the module to trace.
        weights: its hollow tensors.
        dtype: of activations and caches.
        spec: the graph's inputs and outputs.
        facts: what was replaced and how each layer is captured, for the manifest.
        patches: replacements to install while tracing.
    """

    wrapper: GraphModule
    weights: Weights
    dtype: torch.dtype
    spec: GraphSpec
    facts: dict[str, Any]
    patches: list[tuple[Any, str, Callable[..., Any]]] = field(default_factory=list)


class GraphModule(nn.Module):
    """``forward(input_ids, where, logits_positions, pasts) -> (logits, *presents)``; ``where`` depends on the layout."""

    def __init__(self, model: nn.Module, plan: Plan, cached: list[bool]) -> None:
        super().__init__()
        self.model, self.plan, self.cached = model, plan, cached
        self.last: tuple[Capture, Any] | None = None

    def tokens(self, input_ids: Tensor, where: tuple[Tensor, ...], pasts: list[Tensor]) -> Tokens:
        layout = self.plan.layout
        if layout == "slots":
            return slots_tokens(input_ids, *where)
        if layout == "growing":
            return growing_tokens(input_ids, *where)
        make = chunk_tokens if layout == "chunks" else scatter_tokens
        return make(input_ids, *where, capacity=pasts[0].shape[2])

    def forward(self, input_ids: Tensor, where: tuple[Tensor, ...], logits_positions: Tensor | None, pasts: list[Tensor]) -> Any:
        tokens = self.tokens(input_ids, where, pasts)
        capture = Capture(self.plan, tokens, logits_positions)
        pairs = iter(zip(pasts[0::2], pasts[1::2], strict=True))
        with capture.active():
            cache = hooks.export_cache(self.plan, [next(pairs) if cached else None for cached in self.cached])
            out = self.model(
                input_ids=input_ids,
                attention_mask=tokens.valid,
                position_ids=tokens.position_ids,
                cache=cache,
                use_cache=True,
            )
        self.last = (capture, cache)
        presents: list[Tensor] = []
        for layer, cached in zip(cache.layers, self.cached, strict=True):
            if cached:
                presents.extend(layer.present or (layer.past_k, layer.past_v))
        return (out.logits, *presents)


@dataclass
class Reference:
    """What the untouched model answers.

    Attributes:
        rows: token ids of each row.
        logits: ``[len(row), V]`` float32 per row: the row alone, without padding or cache.
        shapes: ``(key/value heads, key size, value size)`` per cache layer; ``None``: the layer keeps none.
    """

    rows: list[list[int]]
    logits: list[Tensor]
    shapes: list[tuple[int, int, int] | None]

    @property
    def scale(self) -> float:
        """The range of the logits, what errors are relative to."""
        return max(float(x.max() - x.min()) for x in self.logits)


ROW_LENGTHS = (14, 9)  # tokens of the reference rows; prompts are shorter, the rest is decoded step by step
PROMPT_LENGTHS = (5, 2)


def reference(model: nn.Module, vocab_size: int, seed: int = 0) -> Reference:
    """Runs the untouched model on random rows.

    Raises:
        UnsupportedError: a layer keeps something other than keys and values, or there is no cache.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in ROW_LENGTHS]
    logits, shapes = [], None
    with torch.no_grad():
        for row in rows:
            out = model(input_ids=torch.tensor([row]), use_cache=shapes is None)
            logits.append(out.logits[0].float())
            shapes = cache_shapes(model, out) if shapes is None else shapes
    assert shapes is not None
    return Reference(rows, logits, shapes)


def cache_shapes(model: nn.Module, out: Any) -> list[tuple[int, int, int] | None]:
    cache = getattr(out, "cache", None)
    cache = getattr(out, "past_key_values", None) if cache is None else cache
    shapes: list[tuple[int, int, int] | None] = []
    for index, layer in enumerate(getattr(cache, "layers", ())):
        if type(layer).__name__ == "DummyLayer":
            shapes.append(None)
            continue
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or hasattr(layer, "conv_states"):
            raise UnsupportedError(f"layer {index} keeps a recurrent state ({type(layer).__name__}), which this exporter cannot carry yet")
        shapes.append((keys.shape[1], keys.shape[3], values.shape[3]))
    if not shapes:
        raise UnsupportedError(f"{type(model).__name__} returns no key/value cache, so it cannot be decoded step by step")
    return shapes


def graph_spec(layout: str, shapes: list[tuple[int, int, int] | None], dtype: torch.dtype, max_seq_len: int, facts: dict[str, Any]) -> GraphSpec:
    name = _NUMPY_NAMES[dtype]
    length = max_seq_len if layout == "scatter" else None
    caches = []
    for index, shape in enumerate(shapes):
        if shape is not None:
            heads, key, value = shape
            caches.append(CacheSpec(index, "key", (None, heads, length, key), name))
            caches.append(CacheSpec(index, "value", (None, heads, length, value), name))
    return GraphSpec(layout, tuple(caches), name, max_seq_len, layout != "growing", facts.get("rope_switch"))


def sample_inputs(spec: GraphSpec, batch: int = 2, new: int = 3, total: int = 7, capacity: int = 9, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Inputs for the trace: sizes all different, a past of ``total - new``, two wanted positions."""
    ids = torch.ones(batch, new, dtype=torch.long)
    layout = spec.layout
    if layout in ("slots", "growing"):
        where: tuple[Tensor, ...] = (torch.ones(batch, total, dtype=torch.long),)
    elif layout == "chunks":
        where = (torch.full((batch,), total - new), torch.full((batch,), new - 1))
    else:
        past = torch.full((batch,), total - new)
        where = (past[:, None] + torch.arange(new)[None], past)
    length = {"growing": total - new, "scatter": spec.max_seq_len}.get(layout, capacity)
    pasts = [torch.zeros(c.sizes(batch, length), dtype=dtype) for c in spec.caches]
    positions = torch.tensor([-2, -1]) if spec.optional_logits_positions else None
    return ids, where, positions, pasts


def probe_inputs(spec: GraphSpec, rows: list[list[int]], dtype: torch.dtype) -> tuple[Any, ...]:
    """A ragged first prompt, right padded (left padded for ``growing``), all positions wanted."""
    lens = torch.tensor([len(row) for row in rows])
    batch, new = len(rows), int(lens.max())
    ids = torch.tensor([row + [0] * (new - len(row)) for row in rows])
    mask = (torch.arange(new)[None] < lens[:, None]).long()
    if spec.layout == "growing":
        ids = torch.stack([row.roll(int(new - n)) for row, n in zip(ids, lens, strict=True)])
        where: tuple[Tensor, ...] = (mask.flip(1),)
        capacity = 0
    else:
        zeros = torch.zeros(batch, dtype=torch.long)
        where = {"slots": (mask,), "chunks": (zeros, lens), "scatter": (torch.arange(new)[None].expand(batch, new), zeros)}[spec.layout]
        capacity = spec.max_seq_len if spec.layout == "scatter" else new + 3
    pasts = [torch.zeros(c.sizes(batch, capacity), dtype=dtype) for c in spec.caches]
    return ids, where, torch.arange(new) if spec.optional_logits_positions else None, pasts


def probe(prepared: Prepared, reference: Reference) -> tuple[float, Capture, Any]:
    """Runs the prepared model eagerly; returns the largest error relative to the logit range, the capture and the cache."""
    plan = prepared.wrapper.plan
    plan.recording, plan.mask_windows = True, []
    rows = [row[:n] for row, n in zip(reference.rows, PROMPT_LENGTHS, strict=True)]
    with torch.no_grad(), substitute.patched(prepared.patches), prepared.weights.streamed(prepared.wrapper):
        logits = prepared.wrapper(*probe_inputs(prepared.spec, rows, prepared.dtype))[0].float()
    plan.recording = False
    worst = 0.0
    for index, (want, row) in enumerate(zip(reference.logits, rows, strict=True)):
        got = logits[index, -len(row) :] if plan.layout == "growing" else logits[index, : len(row)]
        error = float((got - want[: len(row)]).abs().max()) / reference.scale
        worst = max(worst, error) if error == error else float("inf")
    assert prepared.wrapper.last is not None
    capture, cache = prepared.wrapper.last
    prepared.wrapper.last = None
    return worst, capture, cache


def prepare(model: nn.Module, weights: Weights, reference: Reference, layout: str, max_seq_len: int) -> Prepared:
    """Replaces, probes and plans; ``model`` is changed in place.

    Args:
        model: a skeleton whose weights are hollow.
        weights: its hollow tensors.
        reference: what the untouched model answers.

    Raises:
        UnsupportedError: a feature the exporter cannot express.
        VerificationError: the prepared model does not answer like the model.
    """
    facts: dict[str, Any] = {"notes": []}
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    shapes = reference.shapes
    facts["linears"] = substitute.replace_linears(model)
    facts["experts"] = substitute.prepare_experts(model, weights)
    facts["norms"] = substitute.replace_norms(model, weights)
    rotary = substitute.replace_rotary(model, max_seq_len, facts["notes"])
    patches = substitute.rotary_patches(model, facts["notes"])
    substitute.wrap_head(model)
    hooks.use_our_functions(model)
    plan = Plan(layout, [shape is not None and layout != "growing" for shape in shapes])
    wrapper = GraphModule(model, plan, [shape is not None for shape in shapes]).eval()
    prepared = Prepared(wrapper, weights, dtype, graph_spec(layout, shapes, dtype, max_seq_len, facts), facts, patches)
    settle_tiers(prepared, reference)
    switches = {t[2] for r in rotary for t in r.tables.values()} - {None}
    if switches:
        facts["rope_switch"] = min(switches)  # type: ignore[type-var]
        prepared.spec = graph_spec(layout, shapes, dtype, max_seq_len, facts)
    return prepared


def settle_tiers(prepared: Prepared, reference: Reference) -> None:
    """Probes until every layer is captured in a way that gives the model's own logits; see hooks.py for the tiers."""
    plan, facts = prepared.wrapper.plan, prepared.facts
    tolerance = PROBE_TOLERANCE[prepared.dtype]
    error, capture, cache = probe(prepared, reference)
    if not capture.attention_layers:
        plan.additive_masks = True
    fused = [
        wanted and bool(layer.consumed) and layer.index not in capture.unfused
        for wanted, layer in zip(plan.fused, cache.layers, strict=True)
    ]
    if fused != plan.fused or plan.additive_masks:
        plan.fused = fused
        error, capture, cache = probe(prepared, reference)
    facts["probe_error"] = error
    facts["tiers"] = [
        None if not cached else 1 if is_fused else 2 if capture.attention_layers else 3
        for is_fused, cached in zip(plan.fused, prepared.wrapper.cached, strict=True)
    ]
    if not error <= tolerance:
        raise VerificationError(
            f"the prepared model's logits differ from the model's by {error:.1e} of their range (limit {tolerance:.0e}), "
            f"so the export would be wrong; tiers {facts['tiers']}, {'; '.join(facts['notes'])}"
        )


def dynamic_shapes(spec: GraphSpec) -> tuple[Any, ...]:
    dim = torch.export.Dim.DYNAMIC
    if spec.layout in ("slots", "growing"):
        where: tuple[Any, ...] = ({0: dim, 1: dim},)
    elif spec.layout == "chunks":
        where = ({0: dim}, {0: dim})
    else:
        where = ({0: dim, 1: dim}, {0: dim})
    past = {0: dim} if spec.layout == "scatter" else {0: dim, 2: dim}
    return {0: dim, 1: dim}, where, {0: dim} if spec.optional_logits_positions else None, [past for _ in spec.caches]


def input_names(spec: GraphSpec) -> list[str]:
    where = {
        "slots": [io_spec.ATTENTION_MASK],
        "growing": [io_spec.ATTENTION_MASK],
        "chunks": [io_spec.PAST_LENS, io_spec.QUERY_LENS],
        "scatter": [io_spec.POSITION_IDS, io_spec.WRITE_INDICES],
    }[spec.layout]
    positions = [io_spec.LOGITS_POSITIONS] if spec.optional_logits_positions else []
    return [io_spec.INPUT_IDS, *where, *positions, *(c.past for c in spec.caches)]


def output_names(spec: GraphSpec) -> list[str]:
    return [io_spec.LOGITS, *(c.present for c in spec.caches)]


def capture(prepared: Prepared) -> torch.export.ExportedProgram:
    """Traces once. The plan must be settled."""
    inputs = sample_inputs(prepared.spec, dtype=prepared.dtype)
    with torch.no_grad(), substitute.patched(prepared.patches), hooks.exporter_patches(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(prepared.wrapper, inputs, dynamic_shapes=dynamic_shapes(prepared.spec), strict=False)
