"""Groups of linears and the place their scale folds to, observed on models of many kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optkit.checkpoint.model import linears
from optkit.quantize import linear_groups
from optkit.quantize.capture import block_names
from optkit.quantize.linear_groups import Group, LinearProducer, NormProducer, apply, find_groups, fold, linear_weight, proven
from tests import tiny


def block_and_run(model: Any, index: int = 0) -> tuple[nn.Module, list[str], Callable[[], Tensor]]:
    """A block of a model, its linears, and what runs it on 12 tokens."""
    names = list(linears(model))
    prefix = block_names(model, names)[index]
    block = model.get_submodule(prefix)
    seen: dict[str, Any] = {}
    handle = block.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(args=args, kwargs=kwargs), with_kwargs=True
    )
    tokens = torch.randint(3, tiny.VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    model(input_ids=tokens, use_cache=False)
    handle.remove()

    def run() -> Tensor:
        output = block(*seen["args"], **seen["kwargs"])
        return output[0] if isinstance(output, tuple) else output

    return block, [name[len(prefix) + 1 :] for name in names if name.startswith(f"{prefix}.")], run


@torch.no_grad()
def groups_of(architecture: str) -> dict[str, Group]:
    block, names, run = block_and_run(tiny.build(architecture))
    groups = find_groups(block, names, run)
    proven(block, groups, run)
    return {group.linears[0].rpartition(".")[2]: group for group in groups}


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
def test_a_plain_norm_takes_the_scale_as_it_is(architecture: str) -> None:
    groups = groups_of(architecture)
    assert [name.rpartition(".")[2] for name in groups["q_proj"].linears] == ["q_proj", "k_proj", "v_proj"]
    producer = groups["q_proj"].producer
    assert isinstance(producer, NormProducer)
    assert producer.offset == 0.0


@pytest.mark.parametrize("architecture", ["gemma", "gemma2", "gemma3_text"])
def test_a_norm_of_one_plus_w_is_recognised(architecture: str) -> None:
    """Public report: llm-compressor#2102: AWQ on Gemma is gibberish."""
    groups = groups_of(architecture)
    producers = [groups["q_proj"].producer, groups["gate_proj"].producer]
    assert all(isinstance(producer, NormProducer) and producer.offset == 1.0 for producer in producers)


def test_values_fold_through_attention_with_shared_heads() -> None:
    producer = groups_of("llama")["o_proj"].producer  # 4 heads, 2 KV heads of 16: channel h*16+d reads row (h//2)*16+d
    assert isinstance(producer, LinearProducer)
    assert producer.name.endswith("v_proj")
    expected = torch.tensor([(head // 2) * 16 + d for head in range(4) for d in range(16)])
    assert torch.equal(producer.rows, expected)


def test_the_up_projection_feeds_the_down_projection_and_the_gate_does_not() -> None:
    producer = groups_of("llama")["down_proj"].producer
    assert isinstance(producer, LinearProducer)
    assert producer.name.endswith("up_proj")
    assert torch.equal(producer.rows, torch.arange(128))


def test_only_the_value_rows_of_a_fused_projection_are_used() -> None:
    groups = groups_of("phi3")
    values, up = groups["o_proj"].producer, groups["down_proj"].producer
    assert isinstance(values, LinearProducer)
    assert isinstance(up, LinearProducer)
    assert int(values.rows.min()) >= values.outputs - values.outputs // 2
    assert int(up.rows.min()) == up.outputs // 2


def test_a_layer_norm_takes_the_scale_in_weight_and_bias() -> None:
    producer = groups_of("gpt2")["c_attn"].producer
    assert isinstance(producer, NormProducer)
    assert producer.bias is not None


def test_nothing_is_found_behind_a_non_linear_function() -> None:
    assert groups_of("gpt2")["c_fc"].producer is not None
    block, names, run = block_and_run(tiny.build("gpt2"))
    with torch.no_grad():
        groups = find_groups(block, names, run)
    assert [group.producer for group in groups if group.linears == ("mlp.c_proj",)] == [None]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3", "phi3", "gpt2", "cohere"])
def test_logits_do_not_change_when_every_group_is_smoothed(architecture: str) -> None:
    """Public report: llm-compressor#2102: the check that would have caught it, fp32 logits before rounding."""
    model = tiny.build(architecture)
    tokens = torch.randint(3, tiny.VOCAB, (2, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        before = model(input_ids=tokens).logits
        for index in range(len(block_names(model, list(linears(model))))):
            block, names, run = block_and_run(model, index)
            groups = find_groups(block, names, run)
            proven(block, groups, run)
            assert any(group.producer for group in groups)
            for group in groups:
                if group.producer is not None:
                    size = linear_weight(block, group.linears[0]).shape[1]
                    s = 0.25 + 4 * torch.rand(size, generator=torch.Generator().manual_seed(index))
                    apply(block, fold(block, group, group.producer.reduce(s)))
        after = model(input_ids=tokens).logits
    assert linear_groups.output_change(before, after) <= linear_groups.TOLERANCE


def test_a_fold_that_changes_another_reader_of_the_norm_is_rejected() -> None:
    class Block(nn.Module):
        """The norm's output goes to the linear and, unseen by it, to the block's output."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.RMSNorm(32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x)
            return normed + self.linear(normed)

    block = Block().requires_grad_(False)
    x = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
    groups = find_groups(block, ["linear"], lambda: block(x))
    assert groups[0].producer is not None
    proven(block, groups, lambda: block(x))
    assert groups[0].producer is None


def test_probing_leaves_the_weights_alone() -> None:
    model = tiny.build("llama")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    block, names, run = block_and_run(model)
    with torch.no_grad():
        proven(block, find_groups(block, names, run), run)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
