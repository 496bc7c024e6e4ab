"""The facts of a model come from config, generation config and tokenizer, in whatever spelling they have."""

import json
from types import SimpleNamespace

import pytest

from optkit.checkpoint.spec import UNKNOWN_LENGTH, model_spec

BASE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128, "model_type": "x"}


def spec(tmp_path, tied=False, files=None, **config):
    for name, content in (files or {}).items():
        (tmp_path / name).write_text(json.dumps(content))
    return model_spec(SimpleNamespace(**{**BASE, **config}), tmp_path, tied)


def test_key_value_sizes_come_from_head_dim_and_key_value_heads(tmp_path):
    """optimum#2379: "Got 64 Expected 128" from hidden / heads; optimum#1399: key/value heads ignored."""
    found = spec(tmp_path, head_dim=32, num_key_value_heads=2)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (4, 2, 32)


def test_a_config_without_head_dim_divides(tmp_path):
    found = spec(tmp_path, head_dim=None)
    assert (found.num_kv_heads, found.head_dim) == (4, 16)


def test_multi_query_has_one_head_unless_the_newer_decoder_counts_them(tmp_path):
    assert spec(tmp_path, multi_query=True, num_kv_heads=4).num_kv_heads == 1
    assert spec(tmp_path, multi_query=True, num_kv_heads=4, new_decoder_architecture=True).num_kv_heads == 4


def test_a_model_without_attention_has_no_heads(tmp_path):
    found = spec(tmp_path, num_attention_heads=None, head_dim=32)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (0, 0, 0)


def test_end_tokens_are_the_union_of_config_generation_config_and_tokenizer(tmp_path):
    files = {
        "generation_config.json": {"eos_token_id": [2, 7], "bos_token_id": 1},
        "tokenizer_config.json": {"eos_token": {"content": "<|end|>"}},
        "tokenizer.json": {"added_tokens": [{"id": 9, "content": "<|end|>"}]},
    }
    found = spec(tmp_path, files=files, eos_token_id=2, bos_token_id=None, pad_token_id=-1)
    assert found.eos_token_ids == (2, 7, 9)
    assert (found.bos_token_id, found.pad_token_id) == (1, None)


def test_the_tokenizer_s_end_token_is_also_found_in_its_vocabulary(tmp_path):
    files = {"tokenizer_config.json": {"eos_token": "</s>"}, "tokenizer.json": {"model": {"vocab": {"</s>": 5}}}}
    assert spec(tmp_path, files=files).eos_token_ids == (5,)
    files["tokenizer.json"] = {"model": {"vocab": [["</s>", 0.0]]}}
    assert spec(tmp_path, files=files).eos_token_ids == ()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"sliding_window": 8}, 8),
        ({"sliding_window": None}, None),
        ({"sliding_window": 8, "use_sliding_window": False}, None),
        ({"sliding_window": 8, "layer_types": ["full_attention", "full_attention"]}, None),
        ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, 8),
    ],
)
def test_a_window_counts_when_a_layer_uses_it(tmp_path, config, expected):
    assert spec(tmp_path, **config).sliding_window == expected


def test_the_length_comes_from_the_config_then_the_tokenizer_then_a_guess(tmp_path):
    assert spec(tmp_path, max_position_embeddings=300).max_seq_len == 300
    assert spec(tmp_path).max_seq_len == UNKNOWN_LENGTH
    assert spec(tmp_path, files={"tokenizer_config.json": {"model_max_length": 777}}).max_seq_len == 777
    assert spec(tmp_path, files={"tokenizer_config.json": {"model_max_length": 1e30}}).max_seq_len == UNKNOWN_LENGTH
