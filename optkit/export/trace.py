"""A model -> one captured program with explicit inputs: the wrapper, the eager plan, ``torch.export``.

``prepare`` replaces what can be proven equal (substitute.py), runs the model once with our functions on real tensors, compares
the logits with the untouched model's, and decides per layer how its attention is captured. ``capture`` then traces it once with
symbolic batch, sequence, total and capacity sizes. The sample has a padded row and sizes that are all different, so that
nothing is specialised to them; run it again at other sizes to be sure (verify.py does).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from optkit import io_spec
from optkit.errors import UnsupportedError, VerificationError
from optkit.export import hooks, recurrences, rotary, state_hooks, substitute
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
        calls: what the model asked of each call of our attention function.
    """

    wrapper: GraphModule
    weights: Weights
    dtype: torch.dtype
    spec: GraphSpec
    facts: dict[str, Any]
    patches: list[tuple[Any, str, Callable[..., Any]]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)


class GraphModule(nn.Module):
    """``forward(input_ids, where, logits_positions, pasts) -> (logits, *presents)``; ``where`` depends on the layout."""

    def __init__(self, model: nn.Module, plan: Plan, caches: tuple[CacheSpec, ...]) -> None:
        super().__init__()
        self.model, self.plan, self.caches = model, plan, caches
        self.last: tuple[Capture, Any] | None = None

    def tokens(self, input_ids: Tensor, where: tuple[Tensor, ...], pasts: list[Tensor]) -> Tokens:
        layout = self.plan.layout
        if layout == "slots":
            return slots_tokens(input_ids, *where)
        if layout == "growing":
            return growing_tokens(input_ids, *where)
        make = chunk_tokens if layout == "chunks" else scatter_tokens
        buffers = [past for cache, past in zip(self.caches, pasts, strict=True) if cache.role == "key"]
        return make(input_ids, *where, capacity=buffers[0].shape[2] if buffers else 0)  # type: ignore[arg-type, misc]

    def forward(
        self, input_ids: Tensor, where: tuple[Tensor, ...], logits_positions: Tensor | None, pasts: list[Tensor]
    ) -> Any:
        tokens = self.tokens(input_ids, where, pasts)
        capture = Capture(self.plan, tokens, logits_positions)
        by_layer: list[dict[str, Tensor]] = [{} for _ in self.plan.fused]
        for spec, past in zip(self.caches, pasts, strict=True):
            by_layer[spec.layer][spec.role] = past
        with capture.active():
            cache = state_hooks.export_cache(self.plan, by_layer)
            out = self.model(
                input_ids=input_ids,
                attention_mask=tokens.valid if any(c.role == "key" for c in self.caches) else None,
                position_ids=tokens.position_ids,
                cache=cache,
                use_cache=True,
            )
        self.last = (capture, cache)
        layers: Any = cache.layers
        return (out.logits, *(layers[c.layer].present_of(c.role) for c in self.caches))


@dataclass
class Reference:
    """What the untouched model answers.

    Attributes:
        rows: token ids of each row.
        logits: ``[len(row), V]`` float32 per row: the row alone, without padding or cache.
        layers: of the model's cache.
        caches: every tensor the cache keeps.
        patches: replacements for recurrent layers, which define the layout of their states.
        notes: what they recognised.
    """

    rows: list[list[int]]
    logits: list[Tensor]
    layers: int
    caches: list[CacheSpec]
    patches: list[recurrences.Patch]
    notes: list[str]

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
    notes: list[str] = []
    patches = recurrences.state_patches(model, notes) + state_hooks.mask_patches(model)
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0].float() for row in rows]
        with substitute.patched(patches):
            layers, caches = cache_specs(model, model(input_ids=torch.tensor([rows[-1]]), use_cache=True))
    return Reference(rows, logits, layers, caches, patches, notes)


def cache_specs(model: nn.Module, out: Any) -> tuple[int, list[CacheSpec]]:
    """How many layers the model's cache has, and every tensor it keeps after a forward.

    Raises:
        UnsupportedError: no cache, or a layer keeps something other than keys, values and states.
    """
    cache = getattr(out, "cache", None)
    cache = getattr(out, "past_key_values", None) if cache is None else cache
    layers = getattr(cache, "layers", ())
    specs: list[CacheSpec] = []
    for index, layer in enumerate(layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is not None and values is not None:
            for role, tensor in (("key", keys), ("value", values)):
                specs.append(CacheSpec(index, role, (None, tensor.shape[1], None, tensor.shape[3]), _NUMPY_NAMES[tensor.dtype]))
        if state_hooks.is_recurrent(layer):
            specs.extend(state_hooks.state_specs(index, layer))
        elif keys is None and type(layer).__name__ != "DummyLayer":
            raise UnsupportedError(f"layer {index} keeps a {type(layer).__name__}, which the exporter cannot carry")
    if not specs:
        raise UnsupportedError(f"{type(model).__name__} returns no key/value cache, so it cannot be decoded step by step")
    return len(layers), specs


def graph_spec(layout: str, specs: list[CacheSpec], dtype: torch.dtype, max_seq_len: int, facts: dict[str, Any]) -> GraphSpec:
    if layout == "scatter":
        specs = [dataclasses.replace(c, shape=(None, *(max_seq_len if n is None else n for n in c.shape[1:]))) for c in specs]
    return GraphSpec(layout, tuple(specs), _NUMPY_NAMES[dtype], max_seq_len, layout != "growing", facts.get("rope_switch"))


def sample_inputs(
    spec: GraphSpec, batch: int = 2, new: int = 3, total: int = 7, capacity: int = 9, dtype: torch.dtype = torch.float32
) -> tuple[Any, ...]:
    """Inputs for the trace: sizes all different, a past of ``total - new``, two wanted positions."""
    ids = torch.ones(batch, new, dtype=torch.long)
    layout = spec.layout
    if layout in ("slots", "growing"):
        where: tuple[Tensor, ...] = (torch.ones(batch, total, dtype=torch.long),)
    elif layout == "chunks":
        where = (torch.full((batch,), total - new), torch.full((batch,), new - 1))
    else:
        past = torch.full((batch,), total - new)
        where = (past[:, None] + torch.arange(new)[None], past, torch.full((batch,), new - 1))
    length = {"growing": total - new, "scatter": spec.max_seq_len}.get(layout, capacity)
    pasts = [torch.zeros(c.sizes(batch, length), dtype=getattr(torch, c.dtype)) for c in spec.caches]
    positions = torch.tensor([-2, -1]) if spec.optional_logits_positions else None
    return ids, where, positions, pasts


def prompt_inputs(spec: GraphSpec, rows: list[list[int]]) -> tuple[Any, ...]:
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
        where = {
            "slots": (mask,),
            "chunks": (zeros, lens),
            "scatter": (torch.arange(new)[None].expand(batch, new), zeros, lens),
        }[spec.layout]
        capacity = spec.max_seq_len if spec.layout == "scatter" else max(ROW_LENGTHS)
    pasts = [torch.zeros(c.sizes(batch, capacity), dtype=getattr(torch, c.dtype)) for c in spec.caches]
    return ids, where, None if spec.layout == "growing" else torch.arange(new), pasts


def continued_inputs(spec: GraphSpec, lens: list[int], rows: list[list[int]], pasts: list[Tensor]) -> tuple[Any, ...]:
    """The same number of further tokens for every row, after ``lens`` cached ones."""
    past, ids = torch.tensor(lens), torch.tensor(rows)
    new, total = ids.shape[1], past + ids.shape[1]
    longest = int(total.max())
    if spec.layout == "slots":
        where: tuple[Tensor, ...] = ((torch.arange(longest)[None] < total[:, None]).long(),)
    elif spec.layout == "growing":
        where = ((torch.arange(longest)[None] >= longest - total[:, None]).long(),)
    elif spec.layout == "chunks":
        where = (past, torch.full_like(past, new))
    else:
        where = (past[:, None] + torch.arange(new)[None], past, torch.full_like(past, new))
    return ids, where, None if spec.layout == "growing" else torch.arange(new), pasts


FOREIGN = (TypeError, ValueError, RuntimeError, IndexError)  # what a model's own code raises on shapes it does not expect
CONTINUED = 2  # tokens of a further step of the probe: with 1 the model's own code may take a path that is not traced


def probe(prepared: Prepared, reference: Reference, steps: int) -> tuple[float, Capture, Any]:
    """Runs the prepared model eagerly on a ragged prompt and ``steps`` ragged continuations.

    Returns:
        The largest error relative to the logit range, and the capture and cache of the first step.
    """
    plan, wrapper, spec = prepared.wrapper.plan, prepared.wrapper, prepared.spec
    plan.recording, plan.mask_windows = True, []
    lens = list(PROMPT_LENGTHS)
    prompts = [row[:n] for row, n in zip(reference.rows, lens, strict=True)]
    with torch.no_grad(), substitute.patched(prepared.patches), prepared.weights.streamed(wrapper):
        logits, *pasts = wrapper(*prompt_inputs(spec, prompts))
        assert wrapper.last is not None
        capture, cache = wrapper.last
        plan.recording = False
        got = [[row[-n:] if plan.layout == "growing" else row[:n]] for row, n in zip(logits, lens, strict=True)]
        for _ in range(steps):
            more = [row[n : n + CONTINUED] for row, n in zip(reference.rows, lens, strict=True)]
            logits, *pasts = wrapper(*continued_inputs(spec, lens, more, pasts))
            lens = [n + CONTINUED for n in lens]
            for parts, row in zip(got, logits, strict=True):
                parts.append(row[-CONTINUED:])
    wrapper.last = None
    errors = [(torch.cat(g).float() - w[:n]).abs().max() for g, w, n in zip(got, reference.logits, lens, strict=True)]
    worst = float(torch.stack(errors).max()) / reference.scale
    return worst if worst == worst else float("inf"), capture, cache


def prepare(
    model: nn.Module, weights: Weights, reference: Reference, layout: str, max_seq_len: int, fused_experts: bool = True
) -> Prepared:
    """Replaces, probes and plans; ``model`` is changed in place.

    Args:
        model: a skeleton whose weights are hollow.
        weights: its hollow tensors.
        reference: what the untouched model answers.
        layout: of io_spec; a model whose own code cannot work on right-padded ``slots`` gets ``growing``, and facts say why.
        max_seq_len: positions the rotary tables hold.
        fused_experts: the target has an operator for a mixture of experts.

    Raises:
        UnsupportedError: a feature the exporter cannot express.
        VerificationError: the prepared model does not answer like the model.
    """
    facts: dict[str, Any] = {"notes": []}
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    facts["notes"].extend(reference.notes)
    specs = reference.caches
    facts["linears"] = substitute.replace_linears(model)
    facts["experts"] = substitute.prepare_experts(model, weights) if fused_experts else 0
    facts["norms"] = substitute.replace_norms(model, weights)
    embeddings = rotary.replace_rotary(model, max_seq_len, facts["notes"])
    patches = [*reference.patches, *rotary.rotary_patches(model, facts["notes"])]
    substitute.wrap_head(model)
    hooks.use_our_functions(model)
    buffered = {c.layer for c in specs if c.role == "key"}
    wrapper = GraphModule(model, Plan(layout, []), tuple(specs)).eval()
    prepared = Prepared(wrapper, weights, dtype, graph_spec(layout, specs, dtype, max_seq_len, facts), facts, patches)
    failures: list[Exception] = []
    for kind, row_lengths in [(layout, True), (layout, False), *([("growing", False)] if layout == "slots" else [])]:
        fused = [index in buffered and kind != "growing" for index in range(reference.layers)]
        wrapper.plan = Plan(kind, fused, row_lengths=row_lengths)
        prepared.spec = graph_spec(kind, specs, dtype, max_seq_len, facts)
        try:
            settle_tiers(prepared, reference)
            break
        except (VerificationError, *FOREIGN) as error:
            failures.append(error)
    else:
        for failure in failures:
            if isinstance(failure, VerificationError):
                raise failure
        text = " ".join(str(failures[-1]).split())[:300]
        raise UnsupportedError(f"the model's own attention code does not run on the layout {layout!r}: {text}") from failures[
            -1
        ]
    if wrapper.plan.layout != layout:
        facts["layout_reason"] = f"not {layout}: {type(failures[1]).__name__}: {' '.join(str(failures[1]).split())[:200]}"
    switches = {t[2] for r in embeddings for t in r.tables.values()} - {None}
    if switches:
        facts["rope_switch"] = min(switches)  # type: ignore[type-var]
        prepared.spec = graph_spec(wrapper.plan.layout, specs, dtype, max_seq_len, facts)
    return prepared


def settle_tiers(prepared: Prepared, reference: Reference) -> None:
    """Probes until every layer is captured in a way that gives the model's own logits; see hooks.py for the tiers."""
    plan, facts = prepared.wrapper.plan, prepared.facts
    tolerance = PROBE_TOLERANCE[prepared.dtype]
    buffered = {c.layer for c in prepared.wrapper.caches if c.role == "key"}
    try:
        _, capture, cache = probe(prepared, reference, steps=0)
        own_code = bool(buffered) and not capture.attention_layers
        plan.fused = [
            wanted and bool(getattr(layer, "consumed", False)) and layer.index not in capture.unfused
            for wanted, layer in zip(plan.fused, cache.layers, strict=True)
        ]
    except FOREIGN:  # attention code of the model's own met new keys without the old ones
        own_code, plan.fused = True, [False] * len(plan.fused)
    plan.additive_masks = own_code
    error, capture, cache = probe(prepared, reference, steps=min(map(int.__sub__, ROW_LENGTHS, PROMPT_LENGTHS)) // CONTINUED)
    facts["probe_error"], prepared.calls = error, capture.calls
    facts["tiers"] = [
        None if index not in buffered else 1 if is_fused else 2 if capture.attention_layers else 3
        for index, is_fused in enumerate(plan.fused)
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
        where = ({0: dim, 1: dim}, {0: dim}, {0: dim})
    pasts = [{0: dim} if c.growing_axis is None else {0: dim, c.growing_axis: dim} for c in spec.caches]
    return {0: dim, 1: dim}, where, {0: dim} if spec.optional_logits_positions else None, pasts


def input_names(spec: GraphSpec) -> list[str]:
    where = {
        "slots": [io_spec.ATTENTION_MASK],
        "growing": [io_spec.ATTENTION_MASK],
        "chunks": [io_spec.PAST_LENS, io_spec.QUERY_LENS],
        "scatter": [io_spec.POSITION_IDS, io_spec.WRITE_INDICES, io_spec.QUERY_LENS],
    }[spec.layout]
    positions = [io_spec.LOGITS_POSITIONS] if spec.optional_logits_positions else []
    return [io_spec.INPUT_IDS, *where, *positions, *(c.past for c in spec.caches)]


def output_names(spec: GraphSpec) -> list[str]:
    return [io_spec.LOGITS, *(c.present for c in spec.caches)]


def capture(prepared: Prepared) -> torch.export.ExportedProgram:
    """Traces once. The plan must be settled."""
    inputs = sample_inputs(prepared.spec, dtype=prepared.dtype)
    prepared.wrapper.plan.rounding = True
    with torch.no_grad(), substitute.patched(prepared.patches), hooks.exporter_patches(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(prepared.wrapper, inputs, dynamic_shapes=dynamic_shapes(prepared.spec), strict=False)
