"""The positions a scaled rotary embedding reaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.checkpoint.model import open_checkpoint
from tests import tiny


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("llama", tiny.POSITIONS),
        ("llama_dynamic", 4 * tiny.ROPE_SWITCH),
        ("llama_linear", 2 * tiny.POSITIONS),
        ("llama_yarn", tiny.POSITIONS),
        ("phi3_longrope", tiny.POSITIONS),
    ],
)
def test_positions_include_the_factor_of_linear_and_dynamic_scaling_only(name: str, positions: int, tmp_path: Path) -> None:
    assert open_checkpoint(tiny.save(name, tmp_path / name)).spec.max_seq_len == positions
