"""Profiles are solved from the symbols of a graph, and every shape in them is consistent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.errors import LimitError, UnsupportedError, UsageError
from optkit.export.profiles import (
    RTX_CAPABILITIES,
    Range,
    attention_support,
    check_static_cache,
    evaluate,
    free_symbols,
    kernel_limits,
    parse_capabilities,
    solve_profile,
    solve_profiles,
)

SCATTER = {
    "input_ids": ("batch_size", "sequence_length"),
    "position_ids": ("batch_size", "sequence_length"),
    "write_indices": ("batch_size",),
    "past_key_values.0.key": ("batch_size", 2, 64, 16),
    "logits_positions": ("logits_count",),
    "scale": (1, 3),
}
GROWING = {
    "input_ids": ("batch_size", "sequence_length"),
    "attention_mask": ("batch_size", "total_sequence_length"),
    "past_key_values.0.key": ("batch_size", 2, "past_sequence_length", 16),
}


def test_prefill_and_decode_of_a_static_cache() -> None:
    prefill, decode = solve_profiles(SCATTER, max_seq_len=64, max_batch=4, max_prefill=32)
    assert (prefill.name, decode.name) == ("prefill", "decode")
    assert prefill.shapes["input_ids"] == ((1, 1), (1, 8), (4, 32))
    assert decode.shapes["input_ids"] == ((1, 1), (1, 1), (4, 1))
    assert prefill.shapes["past_key_values.0.key"] == ((1, 2, 64, 16), (1, 2, 64, 16), (4, 2, 64, 16))
    assert prefill.shapes["logits_positions"] == ((1,), (1,), (32,))
    assert decode.shapes["logits_positions"] == ((1,), (1,), (1,))
    assert "scale" not in prefill.shapes, "a static input has no range"


def test_the_mask_of_a_growing_cache_is_past_plus_new_at_minimum_optimum_and_maximum() -> None:
    """NVIDIA/TensorRT#1808: "kOPT violates shape constraints" when the three are chosen one by one."""
    for profile in solve_profiles(GROWING, max_seq_len=64, max_batch=2, max_prefill=16):
        for ids, mask, past in zip(*(profile.shapes[n] for n in GROWING), strict=True):
            assert mask[1] == ids[1] + past[2]
            assert mask[0] == ids[0] == past[0]
        fresh = profile.shapes["input_ids"][2][1]
        assert profile.shapes["attention_mask"][2][1] == 64 + fresh, "a full row's neighbours may go on"


def test_a_dimension_written_as_an_expression_is_the_same_as_its_name() -> None:
    written = {**GROWING, "attention_mask": ("batch_size", "past_sequence_length + sequence_length")}
    named = [p.shapes for p in solve_profiles(GROWING, max_seq_len=64)]
    assert [p.shapes for p in solve_profiles(written, max_seq_len=64)] == named


@given(
    max_seq_len=st.integers(1, 4096),
    max_batch=st.integers(1, 64),
    share=st.floats(0.0, 1.0),
    layout=st.sampled_from([SCATTER, GROWING]),
)
def test_every_solution_is_ordered_consistent_and_within_the_limits(max_seq_len, max_batch, share, layout) -> None:
    fresh = max(1, round(max_seq_len * share))
    for profile in solve_profiles(layout, max_seq_len=max_seq_len, max_batch=max_batch, max_prefill=fresh):
        for low, best, high in profile.shapes.values():
            assert all(0 <= a <= b <= c for a, b, c in zip(low, best, high, strict=True))
        assert profile.shapes["input_ids"][2] == (max_batch, fresh if profile.name == "prefill" else 1)
        if layout is GROWING:
            assert all(mask[1] == ids[1] + past[2] for ids, mask, past in zip(*profile.shapes.values(), strict=True))
            assert profile.shapes["attention_mask"][2][1] == max_seq_len + profile.shapes["input_ids"][2][1]


@pytest.mark.parametrize(
    ("text", "value"),
    [("a", 3), (7, 7), ("a + b", 8), ("2*a + b", 11), ("a*b", 15), ("a - 1", 2), ("b - a + 10", 12), ("3", 3), (" a+b ", 8)],
)
def test_expressions(text, value) -> None:
    assert evaluate(text, {"a": 3, "b": 5}) == value


@pytest.mark.parametrize("text", ["a // 2", "2*(a + b)", "floor(a/2)", "c"])
def test_what_is_not_a_sum_of_products_is_refused(text) -> None:
    with pytest.raises(UnsupportedError, match="has no range"):
        evaluate(text, {"a": 3, "b": 5})


def test_a_symbol_nobody_knows_is_refused_with_input_and_remedy_and_taken_when_given() -> None:
    inputs = {**SCATTER, "pixels": ("batch_size", "patches")}
    with pytest.raises(UnsupportedError, match=r"input pixels.*'patches' has no range.*symbols="):
        solve_profiles(inputs, max_seq_len=64)
    prefill, _ = solve_profiles(inputs, max_seq_len=64, max_batch=2, symbols={"patches": Range(1, 4, 9)})
    assert prefill.shapes["pixels"] == ((1, 1), (1, 4), (2, 9))


def test_the_symbols_that_need_a_range_are_listed() -> None:
    assert free_symbols(GROWING) == {"batch_size", "sequence_length", "past_sequence_length"}
    assert free_symbols({"x": ("2*s0 + s1", 4)}) == {"s0", "s1"}


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="max_prefill 65"):
        solve_profiles(SCATTER, max_seq_len=64, max_prefill=65)
    with pytest.raises(UsageError, match="max_batch 0"):
        solve_profiles(SCATTER, max_seq_len=64, max_batch=0)
    with pytest.raises(UsageError, match="min <= opt <= max"):
        Range(2, 1, 3)
    with pytest.raises(UsageError, match="input x"):
        solve_profile("p", {"x": ("a - 5",)}, {"a": Range(1, 6, 9)})


def test_a_static_cache_shorter_than_asked_is_refused() -> None:
    check_static_cache(SCATTER, 64)
    with pytest.raises(LimitError, match=r"past_key_values\.0\.key.*64.*65"):
        check_static_cache(SCATTER, 65)


@pytest.mark.parametrize("text", ["8.6,8.9,12.0", "86, 89,120", "sm_86,SM89,sm120", ["8.6", "8.9", "12.0", "8.6"]])
def test_compute_capabilities_are_read_in_the_usual_spellings(text) -> None:
    assert parse_capabilities(text) == ("8.6", "8.9", "12.0")


def test_hopper_is_sent_to_standard_tensorrt() -> None:
    with pytest.raises(UnsupportedError, match=r"9\.0.*use standard TensorRT"):
        parse_capabilities("8.6,9.0")
    assert parse_capabilities("9.0", "tensorrt") == ("9.0",)


def test_the_capabilities_are_the_library_s() -> None:
    library = pytest.importorskip("tensorrt_rtx")
    names = {name[2:] for name in library.ComputeCapability.__members__ if name.startswith("SM")}
    assert {c.replace(".", "") for c in RTX_CAPABILITIES} == names


@pytest.mark.parametrize("text", ["", "turing", "8", "8.6.1"])
def test_what_is_no_compute_capability_is_refused(text) -> None:
    with pytest.raises(UsageError):
        parse_capabilities(text)


def test_a_model_within_the_kernels_limits_has_no_reasons() -> None:
    assert kernel_limits(head_dim=64, weight_bits=4, group_size=32, capabilities=("8.6", "12.0"), widths={"q": 576}) == []
    assert kernel_limits(head_dim=64, weight_bits=4, group_size=None) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"weight_bits": 4, "group_size": 32, "symmetric": False}, "zero point"),
        ({"weight_bits": 4, "group_size": 128, "widths": {"model.layers.0.q_proj": 576}}, "model.layers.0.q_proj"),
        ({"weight_bits": 4, "group_size": 256}, "group_size 256"),
        ({"weight_bits": 4, "group_size": 32, "capabilities": ("7.5",)}, "7.5 has no INT4"),
        ({"dtype": "bf16", "capabilities": ("7.5", "8.6")}, "7.5 has no BFLOAT16"),
        ({"head_dim": 20}, "head_dim 20"),
    ],
)
def test_kernel_limits_name_what_does_not_fit_before_anything_runs(facts, words) -> None:
    """TensorRT-LLM#1770, #1792, #1580, #962, #1191: AWQ engines that failed by shape or padding after the quantization."""
    reasons = kernel_limits(**{"head_dim": 64, **facts})
    assert len(reasons) == 1
    assert words in reasons[0]


def test_attention_support_by_size_and_type() -> None:
    assert attention_support(64, "fp16") == "fused"
    assert attention_support(512, "fp16") == attention_support(64, "fp32") == attention_support(8, "bf16") == "decomposed"
    assert attention_support(20, "fp16") == "none"
    assert attention_support(20, "fp16", masked=False) == attention_support(20, "fp32") == "decomposed"
