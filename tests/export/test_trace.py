"""Preparing a model: what is replaced, in which layout, and what is refused before anything is traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated
from transformers.models.mamba import modeling_mamba

from optkit.checkpoint.model import open_checkpoint
from optkit.errors import UnsupportedError, VerificationError
from optkit.export import graph, hooks, recurrences, substitute, trace
from optkit.export.weights import Weights
from tests import tiny


def prepared(name: str, directory: Path, layout: str = "slots", **changes: Any) -> trace.Prepared:
    checkpoint = open_checkpoint(tiny.save(name, directory / "checkpoint", **changes))
    reference = graph.untouched_reference(checkpoint, torch.float32)
    return trace.prepare(*graph.hollow(checkpoint, torch.float32), reference, layout, 64)


@pytest.mark.parametrize("layout", ["slots", "chunks", "scatter", "growing"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_every_layout_gives_the_models_logits(name: str, layout: str, tmp_path: Path) -> None:
    found = prepared(name, tmp_path, layout)
    assert found.spec.layout == layout
    assert found.facts["probe_error"] < trace.PROBE_TOLERANCE[torch.float32]
    assert set(found.facts["tiers"]) == ({2} if layout == "growing" else {1})


@pytest.mark.parametrize(
    ("name", "tiers"),
    [
        ("qwen3", [1, 1]),
        ("deepseek_v3", [2, 2]),
        ("bloom", [3, 3]),
        ("gemma3n_text", [1, 1, 2, 2, None, None]),
        ("lfm2", [None, 1, None, 1]),
    ],
)
def test_each_layer_is_captured_in_the_best_way_it_can_be(name: str, tiers: list[int | None], tmp_path: Path) -> None:
    assert prepared(name, tmp_path).facts["tiers"] == tiers


@pytest.mark.parametrize("name", ["bloom", "falcon_alibi", "mpt"])
def test_attention_code_of_the_models_own_runs_in_a_chunked_batch(name: str, tmp_path: Path) -> None:
    assert prepared(name, tmp_path, "chunks").facts["tiers"] == [3, 3]


def test_a_model_whose_code_assumes_left_padding_gets_a_growing_cache_and_the_reason(tmp_path: Path) -> None:
    found = prepared("gpt_neo", tmp_path)
    assert found.spec.layout == "growing"
    assert found.facts["layout_reason"].startswith("not slots: ")


def test_a_model_that_works_in_no_asked_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises((UnsupportedError, VerificationError), match=r"layout 'chunks'|differ"):
        prepared("gpt_neo", tmp_path, "chunks")


def test_positions_computed_from_the_caches_length_are_by_row(tmp_path: Path) -> None:
    assert prepared("llama4_text", tmp_path).wrapper.plan.row_lengths


def test_states_have_fixed_sizes_and_their_own_inputs(tmp_path: Path) -> None:
    caches = {(c.layer, c.role): c for c in prepared("falcon_h1", tmp_path).spec.caches}
    assert caches[0, "key"].shape == (None, 2, None, 16)
    assert caches[0, "conv_state"].shape == (None, 160, 4)
    assert caches[0, "recurrent_state"].shape == (None, 8, 16, 16)
    assert caches[0, "recurrent_state"].growing_axis is None


def test_a_recurrence_that_is_not_recognised_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers#39436: a data-dependent loop over the sequence must not be traced for one length
    monkeypatch.setattr(recurrences, "SCANS", ())
    assert recurrences.replacement_of(modeling_mamba.mamba_selective_scan) is None
    with pytest.raises(UnsupportedError, match="layer 0 computes its recurrent state in code of its own"):
        prepared("mamba", tmp_path)


def test_an_attention_argument_nobody_knows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = hooks.ALL_ATTENTION_FUNCTIONS[hooks.NAME]
    monkeypatch.setitem(
        hooks.ALL_ATTENTION_FUNCTIONS._global_mapping, hooks.NAME, lambda *a, **k: real(*a, **k, score_bias=torch.ones(1))
    )
    with pytest.raises(UnsupportedError, match="score_bias"):
        prepared("llama", tmp_path)


def test_a_gated_norm_is_not_taken_for_a_plain_one() -> None:
    model = torch.nn.ModuleDict({"norm": GraniteMoeHybridRMSNormGated(16, group_size=16)})
    assert substitute.replace_norms(model, Weights()) == 0
