"""The exporter's cache layers with a fixed-size state, next to the key/value layers of hooks.py.

transformers' recurrent layers all talk to their cache in one way, and nothing here knows a model's name:

1. ``cache.get_conv_state`` / ``get_recurrent_state`` hand out the state; :class:`StateLayer` answers with the graph's inputs,
   zeroed for rows that have no past (so a session never has to clear a state).
2. ``cache.update_conv_state(x)`` keeps the last columns *of each row's valid tokens* and returns state and new columns
   joined; the model convolves them (recurrences.py makes that one op).
3. ``cache.update_recurrent_state(final)`` accepts only a state that a scan of recurrences.py made, for those leave out padding.

The models' own padding mask for recurrent layers is switched off: it assumes left padding and the end of the mask.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from optkit.errors import UnsupportedError
from optkit.export.hooks import ExportLayer
from optkit.export.provenance import Capture, Plan
from optkit.export.recurrences import SCANS, Patch, fresh_mask
from optkit.io_spec import CacheSpec

ROLES = ("conv_state", "recurrent_state")


def role_name(kind: str, index: int) -> str:
    """``conv_state``, and ``conv_state_1`` for a layer's second."""
    return kind if index == 0 else f"{kind}_{index}"


def started(capture: Capture, past: Tensor) -> Tensor:
    """``past`` for rows that have one, zeros for rows at their first token."""
    flag = (capture.tokens.past_lens > 0).to(past.dtype)
    return past * flag.view(-1, *[1] * (past.dim() - 1))


def last_columns(capture: Capture, full: Tensor, count: int) -> Tensor:
    """``full [B, C, count + S]`` -> the ``count`` columns that end at each row's last valid token."""
    if capture.plan.layout == "growing":
        return full[..., full.shape[-1] - count :]
    index = capture.tokens.query_lens[:, None] + torch.arange(count)[None]  # [B, count]
    return full.gather(2, index[:, None].expand(-1, full.shape[1], -1))


class StateLayer(LinearAttentionCacheLayerMixin):
    """One recurrent layer's states for the export.

    Args:
        index: of the layer.
        pasts: role -> graph input.
    """

    def __init__(self, index: int, pasts: Mapping[str, Tensor]) -> None:
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states=number_of_states(pasts))
        self.open(index, pasts)

    def open(self, index: int, pasts: Mapping[str, Tensor]) -> None:
        capture = Capture.require()
        self.index, self.pasts, self.state_presents = index, dict(pasts), dict[str, Tensor]()
        for number in range(self.number_of_states):
            self.has_previous_state[number] = True
            for kind, states in zip(ROLES, (self.conv_states, self.recurrent_states), strict=True):
                if (past := pasts.get(role_name(kind, number))) is not None:
                    states[number] = capture.tag(started(capture, past), kind, layer=self, number=number)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the states are the graph's inputs."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        capture, past = Capture.require(), self.conv_states[state_idx]
        assert past is not None
        new = (
            conv_states * fresh_mask(capture)[:, None].to(conv_states.dtype)
            if capture.plan.layout == "growing"
            else conv_states
        )
        full = torch.cat([past.to(new.dtype), new], -1)
        self.state_presents[role_name(ROLES[0], state_idx)] = last_columns(capture, full, past.shape[-1]).to(past.dtype)
        return capture.tag(full, "convolved", new=new, past=past)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        if Capture.require().look(recurrent_states, "scanned") is None:
            raise UnsupportedError(
                f"layer {self.index} computes its recurrent state in code of its own; the exporter knows the recurrences "
                f"of mamba-ssm and flash-linear-attention ({', '.join(s.name for s in SCANS)})"
            )
        self.state_presents[role_name(ROLES[1], state_idx)] = recurrent_states
        return recurrent_states

    def present_of(self, role: str) -> Tensor:
        """The new state; what it was if the model did not touch it."""
        return self.state_presents.get(role, self.pasts[role])


class StateAttentionLayer(ExportLayer, StateLayer):
    """A layer with attention and a recurrence side by side."""

    def __init__(self, index: int, past_k: Tensor, past_v: Tensor, fused: bool, pasts: Mapping[str, Tensor]) -> None:
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states=number_of_states(pasts))
        ExportLayer.__init__(self, index, past_k, past_v, fused)
        self.open(index, pasts)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: buffers and states are the graph's inputs."""

    def present_of(self, role: str) -> Tensor:
        return ExportLayer.present_of(self, role) if role in ("key", "value") else StateLayer.present_of(self, role)


class StateCache(Cache):
    """A Cache that remembers the state it handed out last, for recurrences that do not take it as an argument."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        state: Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
        Capture.require().shared["open_state"] = state
        return state


def number_of_states(pasts: Mapping[str, Tensor]) -> int:
    return max(sum(role.startswith(kind) for role in pasts) for kind in ROLES)


def is_recurrent(layer: Any) -> bool:
    """Does a layer of transformers' own cache keep a state?"""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def state_specs(index: int, layer: Any) -> list[CacheSpec]:
    """The states of a layer of transformers' cache, after a forward with our scans in place (they define the layout)."""
    specs = []
    for number in range(layer.number_of_states):
        for kind, states in zip(ROLES, (layer.conv_states, layer.recurrent_states), strict=True):
            if (state := states[number]) is not None:
                name = str(state.dtype).removeprefix("torch.")
                specs.append(CacheSpec(index, role_name(kind, number), (None, *state.shape[1:]), name))
    return specs


def export_cache(plan: Plan, pasts: list[dict[str, Tensor]]) -> StateCache:
    """A Cache over the graph's past inputs by role; a layer that keeps nothing gets another's buffers and never uses them."""
    filler = next((p for p in pasts if "key" in p), {})
    layers: list[Any] = []
    for index, past in enumerate(pasts):
        states = {role: tensor for role, tensor in past.items() if role not in ("key", "value")}
        if not states:
            own = past or filler
            layers.append(ExportLayer(index, own["key"], own["value"], plan.fused[index]))
        elif "key" in past:
            layers.append(StateAttentionLayer(index, past["key"], past["value"], plan.fused[index], states))
        else:
            layers.append(StateLayer(index, states))
    return StateCache(layers=layers)


def mask_patches(model: nn.Module) -> list[Patch]:
    """Switches the models' padding mask for recurrent layers off."""
    sources = {sys.modules[type(m).__module__] for m in model.modules()}
    wanted = masking_utils.create_recurrent_attention_mask
    return [(s, name, lambda *args, **kwargs: None) for s in sources for name, f in vars(s).items() if f is wanted]
