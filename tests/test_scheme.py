"""Schemes are checked at birth, found by name, and refused for layers they do not fit."""

import dataclasses

import pytest

from optkit.errors import RecipeError, UnsupportedError, UsageError
from optkit.scheme import PRESETS, QuantScheme, check_group_sizes, matches, preset, scheme_from_dict


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_bits": 3}, "num_bits 3"),
        ({"num_bits": 4, "group_size": 48}, "group_size 48"),
        ({"num_bits": 8, "activation_bits": 4}, "activation_bits 4"),
        ({"num_bits": 4, "activation_bits": 8}, "w8a8"),
        ({"num_bits": 8, "activation_bits": 8, "group_size": 32}, "w8a8"),
        ({"num_bits": 8, "activation_bits": 8, "symmetric": False}, "w8a8"),
    ],
)
def test_an_impossible_scheme_is_refused_at_birth(arguments, message):
    with pytest.raises(UsageError, match=message):
        QuantScheme(**arguments)


def test_a_scheme_never_changes():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["w4a16"].num_bits = 8


def test_int8_and_int4_are_weight_only_names():
    assert preset("int8") == preset("w8a16")
    assert preset("INT4") == preset("w4a16")
    assert preset("w8a8").activation_bits == 8
    assert preset("w8a16").activation_bits == 16


def test_an_unknown_scheme_names_the_nearest():
    with pytest.raises(RecipeError, match="did you mean 'w4a16'"):
        preset("w4a61")


@pytest.mark.parametrize("name", ["fp8", "FP8", "float8_e4m3fn", "nvfp4", "mxfp4"])
def test_floating_point_formats_are_refused_with_what_there_is_instead(name):
    with pytest.raises(UnsupportedError, match=r"integers only; w8a8 .* w4a16"):
        preset(name)


def test_a_scheme_survives_its_dictionary():
    for scheme in (*PRESETS.values(), QuantScheme(4, symmetric=False, group_size=64)):
        assert scheme_from_dict(scheme.to_dict()) == scheme


def test_descriptions_tell_schemes_apart():
    schemes = [
        *PRESETS.values(),
        QuantScheme(4, symmetric=False, group_size=32),
        QuantScheme(4, group_size=64),
        QuantScheme(8, activation_bits=8, dynamic_activations=False),
    ]
    assert len({scheme.describe() for scheme in schemes}) == len(schemes)


def test_groups_count_the_scales_of_a_row():
    assert QuantScheme(4, group_size=32).groups(96) == 3
    assert QuantScheme(4, group_size=None).groups(97) == 1
    with pytest.raises(UsageError, match="64 does not divide 96"):
        QuantScheme(4, group_size=64).groups(96)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("k_proj", "model.layers.3.self_attn.k_proj", True),
        ("proj", "model.layers.3.self_attn.k_proj", False),
        ("model.layers.*.mlp.*", "model.layers.3.mlp.up_proj", True),
        ("re:layers\\.(0|1)\\.", "model.layers.1.mlp.up_proj", True),
        ("re:layers\\.(0|1)\\.", "model.layers.11.mlp.up_proj", False),
        ("MODEL.*", "model.layers.3", False),
    ],
)
def test_patterns_are_names_last_parts_globs_and_expressions(pattern, name, expected):
    assert matches(name, [pattern]) is expected


def test_a_group_size_that_does_not_divide_names_every_layer_and_the_sizes_that_do():
    """compressed-tensors#447, AutoAWQ#602, lmdeploy#1560: found while saving, after the hour of calibration."""
    linears = {"a.q": (64, 96), "a.k": (64, 96), "a.o": (96, 128), "a.odd": (8, 90)}
    scheme = QuantScheme(4, group_size=64)
    with pytest.raises(UsageError) as caught:
        check_group_sizes(linears, dict.fromkeys(linears, scheme))
    text = str(caught.value)
    assert "96 inputs of 2 linears (a.q, a.k): use 16 or 32, or channel" in text
    assert "90 inputs of 1 linears (a.odd): use channel" in text
    assert "a.o," not in text
    check_group_sizes(linears, {"a.o": scheme})
