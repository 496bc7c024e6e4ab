"""The fixture that benchmarks of quantization stand on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.fixtures import degrid
from optkit.checkpoint.model import linears, open_checkpoint
from optkit.errors import UnsupportedError
from optkit.quantize.run import quantize
from tests import tiny


def test_degridding_a_quantized_model_changes_its_weights_and_not_its_answers(tmp_path: Path) -> None:
    """Also one whose checkpoint is packed: the demo model is."""
    source = quantize(tiny.save("llama", tmp_path / "hf"), out_dir=tmp_path / "q", scheme="int4", method="rtn", group_size=32)
    before = open_checkpoint(source).dequantized().load()
    after = open_checkpoint(degrid.make(source, tmp_path / "out")).load()
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        ours, theirs = (model(input_ids=ids).logits for model in (after, before))
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 5e-3, "float16 storage"
    moved = [
        name
        for name in linears(before)
        if not torch.allclose(before.get_submodule(name).weight, after.get_submodule(name).weight, rtol=0.01)
    ]
    assert len(moved) == 14


def test_a_model_without_scales_to_move_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(degrid, "degrid", lambda *_: 0)
    with pytest.raises(UnsupportedError, match="no scale"):
        degrid.make(tiny.save("llama", tmp_path / "hf"), tmp_path / "out")
