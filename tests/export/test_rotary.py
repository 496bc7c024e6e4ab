"""Rotary embeddings: tables asked of the module itself, switches found, functions classified by what they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.codegen import modeling_codegen
from transformers.models.glm4 import modeling_glm4
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.llama4 import modeling_llama4

from optkit.errors import UnsupportedError
from optkit.export import rotary
from optkit.export.provenance import Capture, Plan, chunk_tokens
from tests import tiny

MAX = 100


def embedding(name: str) -> nn.Module:
    model = tiny.build(name)
    return next(m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))


def exported(name: str) -> tuple[nn.Module, rotary.ExportRotary]:
    inner = embedding(name)
    return inner, rotary.ExportRotary(inner, MAX, torch.float32)


def capture(past: list[int], new: list[int]) -> Capture:
    ids = torch.ones(len(past), max(new), dtype=torch.long)
    return Capture(Plan("chunks", [], recording=False), chunk_tokens(ids, torch.tensor(past), torch.tensor(new), MAX), None)


def asked(ours: rotary.ExportRotary, past: list[int], new: list[int]) -> tuple[Tensor, Tensor]:
    with capture(past, new).active() as running:
        cos, sin = ours(torch.zeros(1, 1, 1), running.tokens.position_ids)
    return cos, sin


@pytest.mark.parametrize("name", ["llama", "llama3_rope", "llama_yarn", "llama_linear", "phi3", "gpt_oss"])
def test_a_table_answers_like_the_module_for_every_row(name: str) -> None:
    inner, ours = exported(name)
    cos, sin = asked(ours, [0, 40], [5, 3])
    for row, (past, count) in enumerate(((0, 5), (40, 3))):
        want_cos, want_sin = inner(torch.zeros(1, 1, 1), torch.arange(past, past + count)[None])
        torch.testing.assert_close(cos[row, :count], want_cos[0])
        torch.testing.assert_close(sin[row, :count], want_sin[0])


def test_a_longrope_switch_is_found_and_taken_by_each_row_alone() -> None:
    inner, ours = exported("phi3_longrope")
    assert ours.table((), {})[3] == tiny.ROPE_SWITCH
    cos, _ = asked(ours, [62, 63, 3], [2, 2, 2])  # lengths 64, 65 and 5
    long, short = (
        inner(torch.zeros(1, 1, 1), torch.arange(80)[None])[0][0],
        inner(torch.zeros(1, 1, 1), torch.arange(64)[None])[0][0],
    )
    torch.testing.assert_close(cos[0], short[62:64])
    torch.testing.assert_close(cos[1], long[63:65])
    torch.testing.assert_close(cos[2], short[3:5])
    assert not torch.allclose(long[:64], short)


def test_dynamic_scaling_turns_each_row_by_its_own_length() -> None:
    inner, ours = exported("llama_dynamic")
    cos, _ = asked(ours, [70, 90, 10], [3, 3, 3])
    for row, (past, total) in enumerate(((70, 73), (90, 93), (10, 13))):
        inner(torch.zeros(1, 1, 1), torch.tensor([[0]]))  # it remembers the longest sequence it saw until it sees a short one
        want = inner(torch.zeros(1, 1, 1), torch.arange(total)[None])[0][0, past:]
        torch.testing.assert_close(cos[row], want, atol=1e-5, rtol=0)


def test_angles_that_depend_on_the_length_in_another_way_are_refused() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            angles = (position_ids[..., None] * torch.ones(8)) / position_ids.max().clamp(min=1)
            return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()

    with pytest.raises(UnsupportedError, match="depend on the sequence length"):
        asked(rotary.ExportRotary(Odd(), MAX, torch.float32), [0], [4])


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (modeling_llama.apply_rotary_pos_emb, ("half", False)),
        (modeling_glm4.apply_rotary_pos_emb, ("half", True)),
        (modeling_gpt_oss.apply_rotary_pos_emb, ("compact", False)),
        (modeling_llama4.apply_rotary_emb, ("complex", True)),
    ],
)
def test_functions_are_classified_by_what_they_compute(function: Any, kind: tuple[str, bool]) -> None:
    assert rotary.classify_rotary(function) == kind


def test_a_function_that_rotates_the_other_way_keeps_its_own_code() -> None:
    def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, -sin)

    assert rotary.classify_rotary(backwards) is None
    assert rotary.classify_rotary(modeling_codegen.apply_rotary_pos_emb) is None  # takes one tensor, not query and key
