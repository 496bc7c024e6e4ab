"""The reference formulas agree with torch's and transformers' own code, in float64."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from tests import reference

RNG = np.random.default_rng(0)


def t(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x)


def test_norms_are_torchs() -> None:
    x, w, b = RNG.normal(size=(3, 8)), RNG.normal(size=8), RNG.normal(size=8)
    np.testing.assert_allclose(reference.rms_norm(x, w, 1e-6), F.rms_norm(t(x), (8,), t(w), 1e-6), rtol=1e-12)
    np.testing.assert_allclose(reference.layer_norm(x, w, b, 1e-5), F.layer_norm(t(x), (8,), t(w), t(b), 1e-5), rtol=1e-12)


def test_attention_is_torchs_with_grouped_heads_and_a_window() -> None:
    q, k, v = RNG.normal(size=(4, 6, 8)), RNG.normal(size=(2, 6, 8)), RNG.normal(size=(2, 6, 8))
    i = torch.arange(6)
    mask = (i[None] <= i[:, None]) & (i[None] > i[:, None] - 3)
    want = F.scaled_dot_product_attention(t(q), t(k).repeat_interleave(2, 0), t(v).repeat_interleave(2, 0), attn_mask=mask)
    np.testing.assert_allclose(reference.attention(q, k, v, window=3), want, rtol=1e-10)
    np.testing.assert_allclose(reference.attention(q[:, 4:], k, v, window=3, first_position=4), want[:, 4:], rtol=1e-10)


def test_a_sink_only_joins_the_denominator() -> None:
    q, k, v = RNG.normal(size=(1, 1, 4)), RNG.normal(size=(1, 3, 4)), RNG.normal(size=(1, 3, 4))
    scores = np.concatenate([k[0] @ q[0, 0] / 2, [0.7]])
    want = np.exp(scores[:3]) / np.exp(scores).sum() @ v[0]
    np.testing.assert_allclose(reference.attention(q, k, v, first_position=2, sinks=[0.7])[0, 0], want, rtol=1e-12)


def test_rotation_keeps_lengths_and_depends_on_the_distance_only() -> None:
    cos, sin = reference.rope_tables(20, 6)
    for interleaved in (False, True):
        a, b = RNG.normal(size=8), RNG.normal(size=8)
        turned = reference.rotate(np.tile(a, (20, 1)), cos, sin, interleaved)
        other = reference.rotate(np.tile(b, (20, 1)), cos, sin, interleaved)
        np.testing.assert_allclose(np.linalg.norm(turned, axis=1), np.linalg.norm(a), rtol=1e-12)
        np.testing.assert_allclose(turned[9] @ other[4], turned[15] @ other[10], rtol=1e-12)


def test_causal_convolution_is_torchs_and_can_be_cut() -> None:
    x, w, b = RNG.normal(size=(3, 7)), RNG.normal(size=(3, 4)), RNG.normal(size=3)
    want = F.conv1d(t(x)[None], t(w)[:, None], t(b), padding=3, groups=3)[0, :, :7]
    first, past = reference.causal_conv(x[:, :2], w, b)
    second, _ = reference.causal_conv(x[:, 2:], w, b, past)
    np.testing.assert_allclose(np.concatenate([first, second], 1), want, rtol=1e-12)


def test_the_gated_recurrence_is_transformers_state_space_scan() -> None:
    x, dt, a = RNG.normal(size=(6, 5)), RNG.uniform(0.1, 1, 6), -0.7
    b, c = RNG.normal(size=(6, 3)), RNG.normal(size=(6, 3))
    single = [
        t(z.astype(np.float32))
        for z in (x[None, :, None], dt[None, :, None], np.array([a]), b[None, :, None], c[None, :, None])
    ]
    want, state = mamba2_chunk_scan(*single, chunk_size=4, return_final_states=True)
    got, final = reference.linear_attention(c, b, x * dt[:, None], dt * a)
    np.testing.assert_allclose(got, want[0, :, 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(final.T, state[0, 0], rtol=1e-4, atol=1e-5)


def test_the_delta_rule_is_transformers() -> None:
    q, k, v = (RNG.normal(size=(6, n)) for n in (3, 3, 5))
    g, beta = -RNG.uniform(0.1, 1, 6), RNG.uniform(0, 1, 6)
    single = [
        t(z.astype(np.float32))
        for z in (q[None, :, None], k[None, :, None], v[None, :, None], g[None, :, None], beta[None, :, None])
    ]
    want, state = torch_recurrent_gated_delta_rule(*single, output_final_state=True)
    got, final = reference.linear_attention(q, k, v, g, beta, scale=3**-0.5)
    np.testing.assert_allclose(got, want[0, :, 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(final, state[0, 0], rtol=1e-4, atol=1e-5)


def test_rounding_to_nearest_is_within_half_a_step() -> None:
    """A whole step when asymmetric: the zero point is rounded too, so the range's end may be clipped by half a step."""
    w = RNG.normal(size=(4, 64))
    for bits in (4, 8):
        for symmetric, steps in ((True, 0.5), (False, 1.0)):
            q, scale, zero = reference.quantize_groups(w, bits, 16, symmetric)
            back = reference.dequantize(q.reshape(4, 4, 16), scale[..., None], zero[..., None]).reshape(w.shape)
            assert (np.abs(w - back) <= steps * scale.repeat(16, 1) * (1 + 1e-9)).all()


def test_a_zero_group_stays_zero() -> None:
    q, scale, zero = reference.quantize_groups(np.zeros((2, 8)), 4, 4)
    assert not q.any()
    assert not reference.dequantize(q.reshape(2, 2, 4), scale[..., None], zero[..., None]).any()


def test_metrics_have_their_closed_forms() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))
    np.testing.assert_allclose(reference.kl_divergence(logits, logits + 3), 0, atol=1e-12)
    np.testing.assert_allclose(reference.kl_divergence(logits[0], np.zeros(3)), np.log(3) - 1.5 * np.log(2), rtol=1e-12)
    np.testing.assert_allclose(reference.perplexity(logits, [0, 1]), np.exp(-(np.log(0.5) + np.log(0.8)) / 2), rtol=1e-12)
    np.testing.assert_allclose(reference.perplexity(np.zeros((5, 7)), [0] * 5), 7, rtol=1e-12)
    np.testing.assert_allclose(reference.sqnr_db([2.0, 0.0], [1.8, 0.0]), 20, rtol=1e-9)
