"""The exporter's side of transformers: our attention, mask, experts and cache, handed to the model's own code.

transformers lets a model run with attention and mask functions registered under a name (``AttentionInterface``,
``AttentionMaskInterface``), with experts functions, and with any ``Cache``. The functions here recognise what they handed out
(provenance.py) and emit the fused ops of ops.py. What they do not recognise stays the model's own, correct code.

Tiers of a layer: 1, our attention function gets exactly the cache's new keys and values: one fused op over the in-place cache.
2, it gets other keys and values (latent attention, shared layers): ``sdpa`` over what it got. 3, the model does not call the
interface at all: its own code reads the cache we hand it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from optkit.errors import UnsupportedError
from optkit.export.provenance import Capture
from optkit.export.row_lengths import PerRow

NAME = "optkit"

# Arguments that models pass and that change nothing in a causal forward in eval mode.
_HARMLESS = frozenset(
    [
        "dropout",
        "is_causal",
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "cache",
        "past_key_values",
        "return_dict",
        "layer_idx",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "output_router_logits",
        "cache_position",
        "position_embeddings",
        "sliding_window",
        "kwargs",
        "logits_to_keep",
        "num_items_in_batch",
    ]
)


class ExportLayer(CacheLayerMixin):
    """One layer's buffers for the export; ``present`` is filled by whoever writes the cache."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, index: int, past_k: Tensor, past_v: Tensor, fused: bool) -> None:
        super().__init__()
        self.index, self.past_k, self.past_v, self.fused = index, past_k, past_v, fused
        self.present: tuple[Tensor, Tensor] | None = None
        self.used = False  # its update() was called
        self.consumed = False  # its keys reached our attention function
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers are the graph's inputs."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        capture = Capture.require()
        self.used = True
        if self.fused:
            capture.tag(key_states, "new_keys", layer=self, values=value_states)
            return key_states, value_states
        tokens = capture.tokens
        if capture.plan.layout == "growing":
            keys, values = torch.cat([self.past_k, key_states], 2), torch.cat([self.past_v, value_states], 2)
            torch._check(keys.shape[2] == tokens.valid.shape[1])
            torch._check(values.shape[2] == tokens.valid.shape[1])
            self.present = (keys, values)
            return keys, values
        where = (tokens.past_lens, tokens.query_lens, tokens.valid)
        present_k, keys = torch.ops.optkit.cache_write(self.past_k, key_states, *where)
        present_v, values = torch.ops.optkit.cache_write(self.past_v, value_states, *where)
        self.present = (present_k, present_v)
        return keys, values

    def present_of(self, role: str) -> Tensor:
        """The new content of a buffer the layer was given; what it was if the model never wrote it."""
        keys, values = self.present or (self.past_k, self.past_v)
        return keys if role == "key" else values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return Capture.require().tokens.valid.shape[1], 0

    def get_seq_length(self) -> Any:
        capture = Capture.require()
        if capture.plan.row_lengths:
            return PerRow(capture.tokens.past_lens)
        return capture.tokens.valid.shape[1] - capture.tokens.position_ids.shape[1]

    def get_max_length(self) -> int:
        return -1


def _sliding_window(function: Callable[..., Any], size: int) -> bool:
    """Is ``function`` exactly ``key <= query`` and ``key > query - size``? Compared on a grid around the window's edges."""
    edges = (0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 3 * size)
    index = torch.arange(3 * size + 2) if size < 64 else torch.tensor(sorted(set(edges)))
    query, key, zero = index[None, None, :, None], index[None, None, None, :], torch.zeros(1, 1, 1, 1, dtype=torch.long)
    try:
        got = function(zero, zero, query, key)
    except (IndexError, RuntimeError, TypeError):
        return False
    want = (key <= query) & (key > query - size)
    return bool((got.expand_as(want) == want).all())


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> Tensor:
    """Our mask: plain causal and sliding windows are recognised; others use the model's own index function at our slots."""
    capture = Capture.require()
    tokens, found = capture.tokens, None
    if capture.plan.recording:
        if mask_function is causal_mask_function:
            found = 0
        elif local_size is not None and _sliding_window(mask_function, int(local_size)):
            found = int(local_size)
    window = capture.mask_window(found)
    if window is not None:
        mask = capture.causal_mask(window)
    else:
        rows = torch.arange(batch_size)[:, None, None, None]
        keys = torch.arange(tokens.valid.shape[1])[None, None, None, :]
        allowed = mask_function(rows, torch.zeros(1, 1, 1, 1, dtype=torch.long), tokens.query_slots[:, None, :, None], keys)
        mask = allowed & (tokens.valid[:, None, None, :] != 0)
    if capture.plan.additive_masks:
        return torch.where(mask, torch.zeros((), dtype=dtype), torch.full((), torch.finfo(dtype).min, dtype=dtype))
    return mask


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``query [B,H,S,D]`` -> ``[B,S,H,Dv]``; the AttentionInterface contract.

    Raises:
        UnsupportedError: the model passes an argument whose meaning is not known here.
    """
    capture = Capture.require()
    unknown = sorted(k for k, v in kwargs.items() if v is not None and k not in _HARMLESS)
    if unknown:
        raise UnsupportedError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which the exporter does not know"
        )
    layer_index = getattr(module, "layer_idx", None)
    capture.attention_layers.append(layer_index)
    sinks = s_aux if s_aux is not None else sinks
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    cap = float(softcap or 0.0)
    record = capture.look(attention_mask, "mask")
    if attention_mask is None:
        attention_mask, record = capture.causal_mask(0), {"window": 0}
    own = set(module.children())
    widths = {(True, x.shape[3]) for x in (query, key)} | {(False, x.shape[1] * x.shape[3]) for x in (query, key)}
    capture.calls.append(
        {
            "layer": layer_index,
            "window": record["window"] if record else None,
            "scale": scale,
            "softcap": cap,
            "sinks": sinks is not None,
            "qk_norms": sum(norm in own and (by_head, norm.width) in widths for norm, by_head in capture.norms),
        }
    )
    mask = attention_mask
    if position_bias is not None:
        blocked = torch.full((), torch.finfo(position_bias.dtype).min, dtype=position_bias.dtype)
        mask = torch.where(mask, position_bias, blocked) if mask.dtype == torch.bool else mask + position_bias
        record = None
    fresh = capture.look(key, "new_keys")
    layer: ExportLayer | None = fresh["layer"] if fresh is not None and fresh["values"] is value else None
    if layer is None or layer.consumed or capture.plan.layout == "growing":
        if layer is not None and layer.consumed:
            capture.unfused[layer.index] = "its keys are read by another layer too"
        capture.unfused.setdefault(layer_index, "its attention reads other keys than the new ones")
        out = torch.ops.optkit.sdpa(query, key, value, mask, sinks, scale, cap)
    else:
        tables = rotary_of(capture, query, key)
        raw_q, raw_k, cos, sin, interleaved = tables or (query, key, None, None, False)
        tokens = capture.tokens
        out, present_k, present_v = torch.ops.optkit.attention(
            raw_q, raw_k, value, layer.past_k, layer.past_v, tokens.past_lens, tokens.query_lens, tokens.valid,
            cos, sin, tokens.position_ids, mask, sinks, scale, cap,
            record["window"] if record else 0, interleaved, record is not None,
        )  # fmt: skip
        layer.present, layer.consumed = (present_k, present_v), True
    return out.view(out.shape[0], out.shape[1], query.shape[1], value.shape[-1]), None


def rotary_of(capture: Capture, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, bool] | None:
    """Unrotated query and key with their tables, if both come straight from one rotary embedding at the tokens' positions."""
    q, k = capture.look(query, "rotated"), capture.look(key, "rotated")
    if q is None or k is None or q["cos"] is not k["cos"] or q["interleaved"] != k["interleaved"]:
        return None
    if q["positions"] is not capture.tokens.position_ids or k["positions"] is not capture.tokens.position_ids:
        return None
    return q["raw"], k["raw"], q["cos"], q["sin"], q["interleaved"]


def experts_function(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of a module prepared by substitute.prepare_experts; others run transformers' batched formulation."""
    prepared = getattr(module, "optkit_experts", None)
    if prepared is None:
        return ALL_EXPERTS_FUNCTIONS["batched_mm"](module, hidden_states, top_k_index, top_k_weights)
    return prepared(hidden_states, top_k_index, top_k_weights)


ALL_ATTENTION_FUNCTIONS.register(NAME, attention_function)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask_function)
ALL_EXPERTS_FUNCTIONS.register(NAME, experts_function)


def use_our_functions(model: nn.Module) -> None:
    """Every module of the model runs with our attention, mask and experts functions."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None:
            continue
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation_internal = NAME
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation_internal = NAME


@contextlib.contextmanager
def exporter_patches() -> Iterator[dict[Any, Callable[..., Any]]]:
    """transformers' own export work-arounds (5.x ``transformers.exporters``), and its ONNX translations."""
    from transformers.exporters import exporter_onnx
    from transformers.exporters.utils import apply_patches

    with contextlib.ExitStack() as stack:
        stack.enter_context(apply_patches("dynamo"))
        stack.enter_context(apply_patches("onnx"))
        yield dict(exporter_onnx._ONNX_TRANSLATION_TABLE)


def apply_graph_fixes(graph_module: torch.fx.GraphModule) -> None:
    """transformers' clean-ups of an exported program's graph before ONNX translation."""
    from transformers.exporters.utils import apply_fx_node_fixes

    apply_fx_node_fixes("onnx", graph_module)
