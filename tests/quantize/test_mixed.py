"""Choosing by measured KL: methods by `auto`, bits by `max_kl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import optkit
from optkit import manifest
from optkit.checkpoint.model import Checkpoint, open_checkpoint
from optkit.errors import RecipeError, UsageError
from optkit.quantize.divergence import mean_kl
from optkit.quantize.mixed import Unit, most_units, order_units
from tests import reference
from tests.quantize.test_blocks import checkpoint, recipe, text

__all__ = ["checkpoint", "text"]


def facts_of(checkpoint: Checkpoint, out: Path, section: dict[str, Any]) -> dict[str, Any]:
    return dict(manifest.read_manifest(optkit.quantize(checkpoint, section, out)).facts)


def test_auto_keeps_the_method_with_the_least_measured_divergence(checkpoint: Checkpoint, text: Path, tmp_path: Path) -> None:
    facts = facts_of(checkpoint, tmp_path / "auto", recipe(text, "auto"))
    measured = facts["auto"]["kl"]
    assert set(measured) == {"rtn", "gptq", "awq", "awq+gptq"}
    assert facts["auto"]["chosen"] == min(measured, key=measured.get)
    assert measured[facts["auto"]["chosen"]] < measured["rtn"]
    alone = optkit.quantize(checkpoint, recipe(text, facts["auto"]["chosen"]), tmp_path / "alone")
    for path in alone.glob("*.safetensors"):
        assert (tmp_path / "auto" / path.name).read_bytes() == path.read_bytes()


def test_auto_for_8_bit_activations_tries_smoothing(checkpoint: Checkpoint, text: Path, tmp_path: Path) -> None:
    facts = facts_of(checkpoint, tmp_path / "out", recipe(text, "auto", scheme="w8a8"))
    assert set(facts["auto"]["kl"]) == {"rtn", "smoothquant"}


def test_a_budget_gives_a_mix_below_it_that_is_smaller_than_8_bits(checkpoint: Checkpoint, text: Path, tmp_path: Path) -> None:
    free = facts_of(checkpoint, tmp_path / "free", recipe(text, max_kl=100.0))["mixed"]
    assert len(free["curve"]) == 1  # everything at 4 bits is below the budget, and nothing more is measured
    limit = free["curve"][0]["kl"] / 3
    out = tmp_path / "tight"
    mixed = facts_of(checkpoint, out, recipe(text, max_kl=limit))["mixed"]
    kept = [point for point in mixed["curve"] if point["kl"] <= limit]
    best = max(kept, key=lambda point: point["units"])
    assert 0 < best["units"] < len(mixed["units"])
    ordered = sorted(mixed["curve"], key=lambda point: point["units"])
    assert [point["bytes"] for point in ordered] == sorted((point["bytes"] for point in ordered), reverse=True)
    bits = {name: scheme.num_bits for name, scheme in open_checkpoint(out).quantization.items()}
    assert set(bits.values()) == {4, 8}
    assert sum(value == 4 for value in bits.values()) == mixed["four_bit_linears"]


def test_linears_with_one_input_have_the_same_bits(checkpoint: Checkpoint, text: Path, tmp_path: Path) -> None:
    out = optkit.quantize(checkpoint, recipe(text, max_kl=0.05), tmp_path / "out")
    bits = {name: scheme.num_bits for name, scheme in open_checkpoint(out).quantization.items()}
    for layer in range(2):
        for members in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            found = {value for name, value in bits.items() if f"layers.{layer}." in name and name.endswith(members)}
            assert len(found) == 1


def test_the_most_units_are_found_by_measuring_each_mix_once() -> None:
    asked: list[int] = []

    def measure(count: int) -> float:
        asked.append(count)
        return count * 0.01

    assert most_units(measure, 20, 0.075) == 7
    assert len(asked) == len(set(asked)) <= 7


def test_a_budget_below_what_8_bits_cost_is_refused() -> None:
    with pytest.raises(UsageError, match="8 bits everywhere"):
        most_units(lambda count: 0.5 + count, 4, 0.1)


@pytest.mark.parametrize("changes", [{"max_kl": 0.0}, {"max_kl": 0.1, "scheme": "w8a16"}])
def test_a_budget_that_makes_no_sense_is_refused(checkpoint: Checkpoint, text: Path, tmp_path: Path, changes: Any) -> None:
    with pytest.raises(RecipeError, match="max_kl"):
        optkit.quantize(checkpoint, recipe(text, **changes), tmp_path / "out")


def test_cheap_units_go_first() -> None:
    units = [Unit(0, ("a",), 100, 0.5), Unit(1, ("b",), 100, 0.1), Unit(2, ("c",), 1000, 0.5)]
    assert [unit.linears for unit in order_units(units)] == [("c",), ("b",), ("a",)]


def test_the_divergence_is_the_reference_formula() -> None:
    first, second = torch.randn(2, 3, 5, 40, generator=torch.Generator().manual_seed(0)) * 3
    expected = reference.kl_divergence(first.numpy(), second.numpy()).mean()
    assert mean_kl(first, second) == pytest.approx(float(expected), rel=1e-5)
