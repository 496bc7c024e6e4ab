"""Checkpoints as models: the same parameters, ties and logits as transformers' own loading, one tensor at a time."""

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from optkit.checkpoint import model as under_test
from optkit.checkpoint.model import linears, lm_modules, open_checkpoint, quiet, replace_module
from optkit.checkpoint.modules import computes_linear, row_factor
from optkit.checkpoint.store import SINGLE_NAME, write_shards
from optkit.errors import CheckpointError, UnsupportedError
from tests import tiny

IDS = torch.tensor([[1, 5, 9, 77, 3, 100, 42]])


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path_factory.mktemp("cache")))


def saved(tmp_path, name="llama", **changes):
    return tiny.save(name, tmp_path / name, **changes)


def reference(directory, dtype=torch.float32):
    with quiet():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def ties(model):
    named = dict(model.named_parameters(remove_duplicate=False))
    return {name: [other for other, p in named.items() if p is parameter] for name, parameter in named.items()}


def assert_same_tensors(mine, theirs):
    pairs = [(dict(m.named_parameters(remove_duplicate=False)), dict(m.named_buffers())) for m in (mine, theirs)]
    for ours, expected in zip(*pairs, strict=True):
        assert ours.keys() == expected.keys()
        for name, tensor in expected.items():
            assert ours[name].dtype == tensor.dtype, name
            assert torch.equal(ours[name], tensor), name
    assert ties(mine) == ties(theirs)


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_every_architecture_loads_as_transformers_loads_it(tmp_path, name):
    directory = saved(tmp_path, name)
    checkpoint = open_checkpoint(directory)
    assert_same_tensors(checkpoint.load(), reference(directory))
    assert checkpoint.unused_tensors() == []
    assert not checkpoint.quantization


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama_yarn", "gptj", "gemma3n_text", "deepseek_v3", "mamba2", "gpt_oss"])
def test_half_precision_keeps_the_tables_and_parameters_that_transformers_keeps_in_float32(tmp_path, name, dtype):
    directory = saved(tmp_path, name)
    assert_same_tensors(open_checkpoint(directory).load(dtype), reference(directory, dtype))


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mixtral", "gpt2", "gemma3_text", "deepseek_v3"])
def test_a_skeleton_has_no_parameters_in_memory_and_gets_each_by_name(tmp_path, name):
    checkpoint = open_checkpoint(saved(tmp_path, name))
    skeleton = checkpoint.skeleton(torch.float16)
    whole = dict(checkpoint.load(torch.float16).named_parameters(remove_duplicate=False))
    shown = dict(skeleton.named_parameters(remove_duplicate=False))
    assert shown.keys() == whole.keys()
    for key, parameter in shown.items():
        assert parameter.is_meta
        tensor = checkpoint.tensor_for(key, torch.float16)()
        assert (tensor.shape, tensor.dtype) == (parameter.shape, parameter.dtype), key
        assert torch.equal(tensor, whole[key]), key
    assert not any(buffer.is_meta for buffer in skeleton.buffers())
    assert ties(skeleton) == ties(checkpoint.load(torch.float16))
    assert not skeleton.training


def test_a_skeleton_may_be_changed_without_changing_the_next_one(tmp_path):
    checkpoint = open_checkpoint(saved(tmp_path))
    replace_module(checkpoint.skeleton(), "model.layers.0.mlp.up_proj", nn.Identity())
    assert isinstance(checkpoint.skeleton().get_submodule("model.layers.0.mlp.up_proj"), nn.Linear)


def test_a_tensor_that_does_not_exist_is_refused_by_name(tmp_path):
    checkpoint = open_checkpoint(saved(tmp_path))
    with pytest.raises(CheckpointError, match=r"no tensor for model\.layers\.7\.x"):
        checkpoint.tensor_for("model.layers.7.x")


def test_head_dim_and_key_value_heads_survive_a_copied_config(tmp_path):
    """Fast-LLM#102: an exported config that lost head_dim; optimum#2379."""
    directory = saved(tmp_path, "qwen3")
    checkpoint = open_checkpoint(directory)
    assert (checkpoint.spec.head_dim, checkpoint.spec.num_kv_heads) == (32, 2)
    copied = tmp_path / "copy"
    copied.mkdir()
    checkpoint.copy_support_files(copied)
    shutil.copy(directory / SINGLE_NAME, copied)
    assert open_checkpoint(copied).spec == checkpoint.spec
    assert_same_tensors(open_checkpoint(copied).load(), checkpoint.load())
    assert AutoTokenizer.from_pretrained(copied)("then").input_ids == AutoTokenizer.from_pretrained(directory)("then").input_ids


@pytest.mark.parametrize("name", ["llama3_rope", "gemma3_text", "phi3_longrope", "glm", "llama_linear"])
def test_a_config_in_both_spellings_means_the_same_model(tmp_path, name):
    directory = saved(tmp_path, name)
    checkpoint = open_checkpoint(directory)
    copied = tmp_path / "copy"
    copied.mkdir()
    checkpoint.copy_support_files(copied)
    shutil.copy(directory / SINGLE_NAME, copied)
    raw = json.loads((copied / "config.json").read_text())
    assert "rope_theta" in raw
    assert raw["torch_dtype"] == raw["dtype"] == "float32"
    assert AutoConfig.from_pretrained(copied).rope_parameters == AutoConfig.from_pretrained(directory).rope_parameters
    assert torch.equal(logits(open_checkpoint(copied).load()), logits(checkpoint.load()))


# ties


def test_a_tied_head_that_is_stored_too_stays_tied_when_it_is_equal(tmp_path):
    directory = saved(tmp_path, "llama_tied")
    stored = load_file(directory / SINGLE_NAME)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, directory / SINGLE_NAME, metadata={"format": "pt"})
    checkpoint = open_checkpoint(directory)
    model = checkpoint.load()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert checkpoint.spec.tied_embeddings


def test_a_head_stored_with_other_values_is_not_tied_whatever_the_config_says(tmp_path):
    """vllm#45543, transformers#37905: a tied lm_head that lost its own weights."""
    directory = saved(tmp_path, "llama_tied")
    stored = load_file(directory / SINGLE_NAME)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"] * 2
    save_file(stored, directory / SINGLE_NAME, metadata={"format": "pt"})
    checkpoint = open_checkpoint(directory)
    assert not checkpoint.spec.tied_embeddings
    assert_same_tensors(checkpoint.load(), reference(directory))
    assert torch.equal(checkpoint.load().lm_head.weight, stored["lm_head.weight"])


def test_a_checkpoint_that_stores_only_the_head_of_a_tied_pair_loads(tmp_path):
    directory = saved(tmp_path, "llama_tied")
    stored = load_file(directory / SINGLE_NAME)
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    save_file(stored, directory / SINGLE_NAME, metadata={"format": "pt"})
    assert_same_tensors(open_checkpoint(directory).load(), reference(directory))


# storage layouts


def test_experts_stored_one_by_one_become_the_tensor_that_runs(tmp_path):
    directory = saved(tmp_path, "mixtral")
    checkpoint = open_checkpoint(directory)
    stored = [name for name in checkpoint.tensors.names() if ".experts." in name]
    assert len(stored) == 2 * 4 * 3
    name = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(checkpoint.tensor_for(name)(), reference(directory).get_parameter(name))


def test_any_number_of_shards_gives_the_same_model(tmp_path):
    directory = saved(tmp_path)
    stored = load_file(directory / SINGLE_NAME)
    (directory / SINGLE_NAME).unlink()
    assert len(write_shards(directory, stored.items(), 20_000)) > 5
    checkpoint = open_checkpoint(directory)
    assert_same_tensors(checkpoint.load(), tiny.build("llama"))


def test_tensors_without_the_base_prefix_are_found(tmp_path):
    directory = saved(tmp_path, "gpt2")
    stored = {name.removeprefix("transformer."): tensor for name, tensor in load_file(directory / SINGLE_NAME).items()}
    save_file(stored, directory / SINGLE_NAME, metadata={"format": "pt"})
    assert_same_tensors(open_checkpoint(directory).load(), reference(directory))


def test_tensors_that_nothing_takes_are_listed(tmp_path):
    directory = saved(tmp_path)
    stored = load_file(directory / SINGLE_NAME)
    stored["model.layers.0.self_attn.mystery"] = torch.zeros(3)
    save_file(stored, directory / SINGLE_NAME, metadata={"format": "pt"})
    assert open_checkpoint(directory).unused_tensors() == ["model.layers.0.self_attn.mystery"]


# damage


def test_a_missing_tensor_is_refused_by_name_and_not_made_up(tmp_path):
    """MNN#4683: weights missing from a mapping gave a model that talks nonsense."""
    directory = saved(tmp_path, "qwen3")
    stored = load_file(directory / SINGLE_NAME)
    del stored["model.layers.1.self_attn.q_norm.weight"]
    save_file(stored, directory / SINGLE_NAME, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no tensor for model\.layers\.1\.self_attn\.q_norm\.weight"):
        open_checkpoint(directory).load()


def test_a_truncated_download_is_one_line_that_names_the_file(tmp_path):
    directory = saved(tmp_path)
    path = directory / SINGLE_NAME
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated") as caught:
        open_checkpoint(directory)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", CheckpointError, "not valid JSON"),
        ("{}", CheckpointError, r"config\.json"),
        ('{"model_type": "nothing_like_this"}', UnsupportedError, "nothing_like_this"),
        ('{"model_type": "llama", "hidden_size": "wide"}', CheckpointError, r"config\.json: not a usable config"),
    ],
)
def test_an_unusable_config_is_one_line_that_names_the_file(tmp_path, text, error, message):
    directory = saved(tmp_path)
    (directory / "config.json").write_text(text)
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(directory)
    assert "\n" not in str(caught.value)
    assert "config.json" in str(caught.value)


def test_a_directory_without_config_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: No such file"):
        open_checkpoint(tmp_path)


def test_a_model_that_is_no_causal_language_model_is_refused(tmp_path):
    directory = saved(tmp_path)
    (directory / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(UnsupportedError, match="transformers"):
        open_checkpoint(directory).skeleton()


def test_another_quantization_method_is_refused_by_its_name(tmp_path):
    directory = saved(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(UnsupportedError, match="bitsandbytes"):
        open_checkpoint(directory)


def test_opening_and_loading_print_nothing(tmp_path, capfd):
    checkpoint = open_checkpoint(saved(tmp_path))
    capfd.readouterr()
    checkpoint.load()
    assert capfd.readouterr() == ("", "")


# parts of a model


@pytest.mark.parametrize(
    ("name", "expected"),
    [("llama", ("model.embed_tokens", "lm_head")), ("gpt_neox", ("gpt_neox.embed_in", "lm_head"))],
)
def test_embedding_and_head_are_found_by_asking_the_model(name, expected):
    assert lm_modules(tiny.build(name)) == expected


def test_linears_are_in_model_order_without_the_head_and_in_one_orientation():
    found = linears(tiny.build("gpt2"))
    assert list(found)[:4] == [f"transformer.h.0.{part}" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    assert found["transformer.h.0.attn.c_attn"] == (192, 64)
    assert "lm_head" not in found
    assert len(linears(tiny.build("falcon"))) == 8  # its own subclass of Linear


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Spelled(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T + self.bias


def test_a_linear_with_a_forward_of_its_own_counts_if_it_computes_the_same():
    assert computes_linear(Spelled(4, 3))
    assert not computes_linear(Doubled(4, 3))
    assert list(linears(nn.Sequential(Spelled(4, 3), Doubled(3, 4)))) == ["0"]


class Shifted(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) + 1


def test_what_an_embedding_multiplies_its_rows_by_is_found_by_looking_up():
    assert row_factor(nn.Embedding(9, 4)) == 1.0
    assert row_factor(tiny.build("gemma3_text").get_input_embeddings()) == 8.0
    with pytest.raises(UnsupportedError, match="embedding: keep"):
        row_factor(Shifted(9, 4))


# GGUF


def write_gguf(path, hidden=32, heads=4, layers=1, vocabulary=40):
    """A llama with random float16 weights."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(48)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*"abcdefghijklmnopqrstuvwxyz012345678", "ab", "<s>", "</s>", "<unk>", "<pad>"][:vocabulary])
    writer.add_token_types([1] * 36 + [3] * 4)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(36)
    writer.add_eos_token_id(37)
    generator = np.random.default_rng(0)
    shapes = {"token_embd": (vocabulary, hidden), "output_norm": (hidden,), "output": (vocabulary, hidden)}
    for i in range(layers):
        block = {"attn_norm": (hidden,), "ffn_norm": (hidden,), "ffn_down": (hidden, 48)}
        block |= dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (hidden, hidden))
        block |= dict.fromkeys(("ffn_gate", "ffn_up"), (48, hidden))
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        writer.add_tensor(
            f"{name}.weight", generator.standard_normal(shape).astype(np.float16 if len(shape) > 1 else np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def gguf_file(tmp_path):
    return write_gguf(tmp_path / "model.gguf")


def test_config_and_tokenizer_of_a_gguf_file_are_written_once_and_its_tensors_are_read_in_place(gguf_file, monkeypatch, capfd):
    checkpoint = open_checkpoint(gguf_file)
    assert checkpoint.given == str(gguf_file)
    assert checkpoint.directory.is_dir()
    assert checkpoint.tensors.dtype("model.embed_tokens.weight") == torch.float16
    config = json.loads((checkpoint.directory / "config.json").read_text())
    assert "quantization_config" not in config
    assert 37 in checkpoint.spec.eos_token_ids
    assert "Converting" not in capfd.readouterr().err
    first = logits(checkpoint.load(), torch.tensor([[1, 2, 3]]))
    assert first.isfinite().all()
    monkeypatch.setattr(under_test.gguf_support, "write_support", lambda *_: pytest.fail("converted again"))
    again = open_checkpoint(gguf_file.rename(gguf_file.with_name("renamed.gguf")))
    assert again.directory == checkpoint.directory
    assert torch.equal(logits(again.load(), torch.tensor([[1, 2, 3]])), first)


def test_a_directory_with_only_a_gguf_file_says_to_name_the_file(gguf_file):
    with pytest.raises(CheckpointError, match=r"give its own path: .*model\.gguf"):
        open_checkpoint(gguf_file.parent)


def test_a_gguf_that_is_cut_or_is_not_one_is_one_line_and_leaves_nothing(gguf_file, tmp_path, cache):
    data = gguf_file.read_bytes()
    for name, content in {"cut": data[: len(data) // 2], "short": data[:100], "other": b"PK" + data}.items():
        bad = tmp_path / f"{name}.gguf"
        bad.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{name}\.gguf") as caught:
            open_checkpoint(bad)
        assert "\n" not in str(caught.value)
    folder = under_test.files.cache_directory() / "gguf"
    assert not folder.exists() or not list(folder.iterdir())
