"""Recurrent layers: the ops against the formulas, recognition by behaviour, padding, and what is refused."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from optkit.errors import UnsupportedError
from optkit.export import recurrences, state_hooks
from optkit.export.provenance import Capture, Plan, chunk_tokens
from tests import reference

OPS = torch.ops.optkit


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def capture(lengths: tuple[int, ...], past: int = 0) -> Capture:
    """Rows of ``lengths`` new tokens after ``past`` cached ones."""
    ids = torch.ones(len(lengths), max(lengths), dtype=torch.long)
    tokens = chunk_tokens(ids, torch.full((len(lengths),), past), torch.tensor(lengths), past + max(lengths))
    return Capture(Plan("chunks", [], recording=False), tokens, None)


@pytest.mark.parametrize("beta", [False, True])
@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_op_is_the_recurrence(beta: bool, per_key: bool, groups: int) -> None:
    q, k, v = randn(2, 5, groups, 8), 0.3 * randn(2, 5, groups, 8, seed=1), randn(2, 5, 4, 6)
    decay = -randn(*((2, 5, 4, 8) if per_key else (2, 5, 4))).abs()
    rate, state = randn(2, 5, 4).sigmoid() if beta else None, randn(2, 4, 8, 6)
    out, final = OPS.linear_attention(q, k, v, decay, rate, state, 0.3)
    for b in range(2):
        for h in range(4):
            group = h * groups // 4
            row = None if rate is None else rate[b, :, h]
            want, end = reference.linear_attention(
                q[b, :, group], k[b, :, group], v[b, :, h], decay[b, :, h], row, state[b, h], 0.3
            )
            np.testing.assert_allclose(out[b, :, h], want, atol=2e-5)
            np.testing.assert_allclose(final[b, h], end, atol=2e-5)


@pytest.mark.parametrize("silu", [False, True])
def test_the_convolution_op_is_the_formula(silu: bool) -> None:
    x, past, weight, bias = randn(2, 6, 5), randn(2, 6, 3), randn(6, 4), randn(6)
    out = OPS.causal_conv(x, past, weight, bias, silu)
    for b in range(2):
        want, _ = reference.causal_conv(x[b], weight, bias, past[b])
        np.testing.assert_allclose(out[b], reference.silu(want) if silu else want, atol=1e-5)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (modeling_mamba, {"causal_conv1d_fn", "mamba_selective_scan"}),
        (modeling_mamba2, {"causal_conv1d_fn", "mamba2_chunk_scan"}),
        (modeling_lfm2, {"causal_conv1d_fn"}),
        (modeling_kimi_linear, {"causal_conv1d_fn", "chunk_kimi_delta_attention"}),
        (modeling_qwen3_next, {"causal_conv1d_fn", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"}),
    ],
)
def test_kernel_library_functions_are_recognised(source: types.ModuleType, names: set[str]) -> None:
    found = {name for name, f in vars(source).items() if isinstance(f, types.FunctionType) and recurrences.replacement_of(f)}
    assert found == names


def test_a_function_that_only_looks_the_same_is_not_recognised() -> None:
    def other_scan(
        hidden_states: torch.Tensor, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, D: Any = None, dt_bias: Any = None,
        initial_states: Any = None, dt_softplus: bool = False, dt_limit: Any = None, return_final_states: bool = False,
    ) -> Any:  # fmt: skip
        out, state = modeling_mamba2.mamba2_chunk_scan(
            hidden_states, dt, 0.9 * A, B, C, chunk_size, D, dt_bias, initial_states, dt_softplus, dt_limit, return_final_states
        )
        return out, state

    def other_convolution(hidden_states: torch.Tensor, weight: torch.Tensor, bias: Any = None, activation: Any = None) -> Any:
        out = F.conv1d(hidden_states, weight[:, None], bias, padding=3, groups=len(weight))[..., 3:]  # looks ahead
        return out if activation is None else F.silu(out)

    assert recurrences.replacement_of(other_scan) is None
    assert recurrences.replacement_of(other_convolution) is None


def test_padding_leaves_the_state_as_it_is() -> None:
    arguments = (randn(2, 5, 2, 8), randn(2, 5, 2, 8, seed=1), randn(2, 5, 4, 6), -randn(2, 5, 4).abs())
    state = randn(2, 4, 8, 6)
    with capture((5, 2)).active():
        out, final = recurrences.scan(*arguments, None, state, 1.0)
    alone, end = recurrences.scan(*(a[1:, :2] for a in arguments), None, state[1:], 1.0)
    torch.testing.assert_close(out[1:, :2], alone)
    torch.testing.assert_close(final[1:], end)


@pytest.mark.parametrize("lengths", [(5, 2), (1, 1), (3, 1)])
def test_a_convolution_state_ends_at_each_rows_last_token(lengths: tuple[int, int]) -> None:
    x, past = randn(2, 6, max(lengths)), randn(2, 6, 4)
    with capture(lengths, past=7).active():
        layer = state_hooks.StateLayer(0, {"conv_state": past})
        layer.update_conv_state(x)
    for b, n in enumerate(lengths):
        torch.testing.assert_close(layer.present_of("conv_state")[b], torch.cat([past[b], x[b, :, :n]], 1)[:, -4:])


def test_a_row_without_a_past_starts_from_zero_whatever_the_buffer_holds() -> None:
    with capture((3, 2), past=0).active():
        layer = state_hooks.StateLayer(0, {"conv_state": randn(2, 6, 4), "recurrent_state": randn(2, 4, 8, 6)})
    assert not layer.conv_states[0].any()
    assert not layer.recurrent_states[0].any()


def test_a_recurrence_of_the_models_own_is_refused() -> None:
    with capture((3, 2)).active():
        layer = state_hooks.StateLayer(5, {"recurrent_state": randn(2, 4, 8, 6)})
        with pytest.raises(UnsupportedError, match="layer 5 computes its recurrent state in code of its own"):
            layer.update_recurrent_state(randn(2, 4, 8, 6))
