"""The quantize stage: what it writes is what transformers reads, on every policy and architecture; bad input leaves nothing."""

import dataclasses
import errno
import json
import math
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

import optkit
from optkit import manifest
from optkit.checkpoint import store
from optkit.checkpoint.affine import dequantize
from optkit.checkpoint.model import linears, open_checkpoint, quiet
from optkit.checkpoint.quant_linear import QuantEmbedding, QuantLinear
from optkit.checkpoint.store import CODES_NAME, INDEX_NAME, SINGLE_NAME
from optkit.errors import CheckpointError, RecipeError, StorageError, UnsupportedError, UsageError, VerificationError
from optkit.quantize import run as stage
from optkit.quantize.rtn import Rtn
from optkit.recipe import QuantizeRecipe
from optkit.scheme import QuantScheme
from tests import tiny

IDS = torch.tensor([[1, 5, 9, 77, 3, 100, 42], [7, 7, 8, 9, 10, 11, 12]])
EMBEDDING = "model.embed_tokens"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path_factory.mktemp("cache")))


def logits(model):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(IDS, use_cache=False).logits


def transformers_model(directory, dtype=torch.float32, **config):
    """What transformers itself makes of a directory."""
    options = {"quantization_config": CompressedTensorsConfig(**config)} if config else {}
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager", **options)
    return model.eval()


def made(tmp_path, name="llama", model=None, **options):
    """``(source, quantized)`` checkpoints of a tiny model."""
    source = tiny.save(name, tmp_path / "source", **(model or {}))
    out = optkit.quantize(source, out_dir=tmp_path / "out", **{"group_size": 32, **options})
    return open_checkpoint(source), open_checkpoint(out)


def facts(checkpoint):
    return manifest.read_manifest(checkpoint.directory, "quantized-checkpoint").facts


WIDE = {"hidden_size": 128}  # for int8's own group of 128
SCHEMES = {
    "w4a16 g32": {"group_size": 32},
    "w4a16 g64": {"group_size": 64},
    "w4a16 g32 asym": {"group_size": 32, "symmetric": False},
    "w4a16 channel": {"group_size": "channel"},
    "w8a16 g32": {"scheme": "w8a16", "group_size": 32},
    "w8a16 g32 asym": {"scheme": "w8a16", "group_size": 32, "symmetric": False},
    "w8a16 channel": {"scheme": "int8", "group_size": "channel"},
    "w8a8": {"scheme": "w8a8", "group_size": None},
    "w8a8 with floating ends": {"scheme": "w8a8", "group_size": None, "embedding": "keep", "lm_head": "keep"},
    "int4 body, dynamic int8 head": {"lm_head": "w8a8", "embedding": "keep"},
    "int4 body, int8 head": {"lm_head": "w8a16", "model": WIDE},
    "asymmetric body, symmetric head": {"symmetric": False, "lm_head": "w8a16", "model": WIDE},
    "no linears": {"ignore": ("re:proj$",)},
}


@pytest.mark.parametrize("name", SCHEMES)
def test_transformers_reads_what_is_written_and_computes_the_same_logits(tmp_path, name):
    _, checkpoint = made(tmp_path, **SCHEMES[name])
    expected = logits(checkpoint.load())
    assert torch.equal(logits(transformers_model(checkpoint.directory)), expected)
    assert expected.std() > 0.1


@pytest.mark.parametrize("symmetric", [True, False])
def test_dequantizing_while_loading_gives_the_same_weights(tmp_path, symmetric):
    """Their arithmetic has the type of the scales then, in which the products are exact."""
    _, checkpoint = made(tmp_path, symmetric=symmetric)
    assert torch.equal(logits(transformers_model(checkpoint.directory, dequantize=True)), logits(checkpoint.load()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_models_agree_too(tmp_path, dtype):
    _, checkpoint = made(tmp_path, "llama_tied")
    model = checkpoint.load(dtype)
    assert model.model.layers[0].self_attn.q_proj.weight_scale.dtype == dtype
    assert model(IDS).logits.dtype == dtype
    theirs, ours = (logits(m).float() for m in (transformers_model(checkpoint.directory, dtype), model))
    assert (theirs - ours).abs().max() < 2e-2 * (ours.max() - ours.min())


ARCHITECTURES = (
    "llama_mha",
    "qwen3",
    "mixtral",
    "gpt2",
    "gemma3_text",
    "falcon",
    "gpt_neox",
    "opt",
    "bloom",
    "phi3",
    "lfm2",
    "deepseek_v3",
)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_architecture_gives_a_directory_that_transformers_computes_the_same_with(tmp_path, name):
    source, checkpoint = made(tmp_path, name)
    model = checkpoint.load()
    quantized = [m for m in model.modules() if isinstance(m, QuantLinear | QuantEmbedding)]
    wanted = {n for n, (outputs, _) in linears(source.skeleton()).items() if outputs >= 8}
    assert wanted <= set(checkpoint.quantization)
    assert len(quantized) == len(checkpoint.quantization) == len(wanted) + 2
    # falcon's own weight initialisation looks for weights that are packed
    theirs = logits(transformers_model(checkpoint.directory, **({"dequantize": True} if name == "falcon" else {})))
    assert (theirs - logits(model)).abs().max() <= 1e-5 * (theirs.max() - theirs.min())
    assert (theirs - logits(checkpoint.load(packed=False))).abs().max() <= 1e-5 * (theirs.max() - theirs.min())
    assert checkpoint.unused_tensors() == []


def test_weights_are_those_of_rounding_to_nearest(tmp_path):
    source, checkpoint = made(tmp_path, scale_search="minmax")
    weight = source.tensor_for("model.layers.1.mlp.down_proj.weight")()
    quantized = checkpoint.quantized("model.layers.1.mlp.down_proj")
    step = quantized.scale.float().abs().repeat_interleave(32, 1)
    assert ((dequantize(quantized) - weight).abs() <= 0.5 * step + 0.016 * step + 1e-6).sum() > 0.98 * weight.numel()
    assert ((dequantize(quantized) - weight).abs() <= 1.02 * step).all()
    assert bool((quantized.scale < 0).any())


def test_a_skeleton_of_a_quantized_checkpoint_has_its_packed_tensors_by_name(tmp_path):
    _, checkpoint = made(tmp_path, symmetric=False)
    skeleton, whole = checkpoint.skeleton(), checkpoint.load()
    buffers = dict(whole.named_buffers())
    shown = {name: buffer for name, buffer in skeleton.named_buffers() if buffer.is_meta}
    assert len(shown) == 3 * len(checkpoint.quantization)
    for name, buffer in shown.items():
        tensor = checkpoint.tensor_for(name)()
        assert (tensor.shape, tensor.dtype) == (buffer.shape, buffer.dtype), name
        assert torch.equal(tensor, buffers[name]), name


# tied embedding and lm_head: llm-compressor#2798, #2835, vllm#45543, transformers#37905, mobius#671, GPTQModel#3050


def test_share_makes_one_quantized_tensor_of_embedding_and_head(tmp_path):
    _, checkpoint = made(tmp_path, "llama_tied", tied="share")
    model = checkpoint.load()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, QuantEmbedding)
    assert isinstance(head, QuantLinear)
    assert head.weight_packed is embedding.weight_packed
    assert head.weight_scale is embedding.weight_scale
    assert checkpoint.spec.tied_embeddings
    assert facts(checkpoint)["tied"] == "share"
    assert list(facts(checkpoint)["codes"]) == [EMBEDDING]
    theirs = transformers_model(checkpoint.directory)
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert torch.equal(logits(theirs), logits(model))
    assert torch.equal(theirs.lm_head.weight, embedding.dequantized())
    skeleton = checkpoint.skeleton()
    assert skeleton.lm_head.weight_packed is skeleton.model.embed_tokens.weight_packed
    unpacked = checkpoint.load(packed=False)
    assert unpacked.lm_head.weight is unpacked.model.embed_tokens.weight


def test_share_is_stored_in_float16_when_that_is_exact_and_in_float32_when_not(tmp_path):
    _, exact = made(tmp_path / "a", "llama_tied")
    _, wide = made(tmp_path / "b", "llama_tied", scheme="w8a16")
    assert exact.tensors.dtype(f"{EMBEDDING}.weight") == torch.float16
    assert wide.tensors.dtype(f"{EMBEDDING}.weight") == torch.float32
    assert torch.equal(logits(transformers_model(wide.directory)), logits(wide.load()))


def test_untie_gives_each_its_own_tensor_and_scheme(tmp_path):
    source, checkpoint = made(tmp_path, "llama_tied", tied="untie", embedding="keep")
    model = checkpoint.load()
    assert isinstance(model.lm_head, QuantLinear)
    assert torch.equal(model.model.embed_tokens.weight, source.load().model.embed_tokens.weight)
    assert not checkpoint.spec.tied_embeddings
    assert json.loads((checkpoint.directory / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(logits(transformers_model(checkpoint.directory)), logits(model))


def test_untie_of_two_quantized_ends_stores_both(tmp_path):
    _, checkpoint = made(tmp_path, "llama_tied", tied="untie")
    model = checkpoint.load()
    assert isinstance(model.model.embed_tokens, QuantEmbedding)
    assert isinstance(model.lm_head, QuantLinear)
    assert model.lm_head.weight_packed is not model.model.embed_tokens.weight_packed
    assert torch.equal(logits(transformers_model(checkpoint.directory)), logits(model))


def test_untie_with_a_floating_head_stores_a_head(tmp_path):
    _, checkpoint = made(tmp_path, "llama_tied", tied="untie", lm_head="keep")
    model = checkpoint.load()
    assert "lm_head.weight" in checkpoint.tensors
    assert isinstance(model.model.embed_tokens, QuantEmbedding)
    assert torch.equal(logits(transformers_model(checkpoint.directory)), logits(model))


def test_keep_leaves_the_one_tensor_as_it_was(tmp_path):
    source, checkpoint = made(tmp_path, "llama_tied", tied="keep")
    model = checkpoint.load()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, source.load().lm_head.weight)
    assert "lm_head.weight" not in checkpoint.tensors
    assert set(facts(checkpoint)["floating"]) == {EMBEDDING, "lm_head"}
    assert torch.equal(logits(transformers_model(checkpoint.directory)), logits(model))


def test_two_schemes_for_one_shared_tensor_are_refused(tmp_path):
    with pytest.raises(UsageError, match="tied: untie"):
        made(tmp_path, "llama_tied", lm_head="keep")


def test_a_duplicate_of_a_tied_head_is_not_carried_along(tmp_path):
    """optimum#1326, optimum#2241: a tied lm_head written twice."""
    source = tiny.save("llama_tied", tmp_path / "source")
    stored = load_file(source / SINGLE_NAME)
    stored["lm_head.weight"] = stored[f"{EMBEDDING}.weight"].clone()
    save_file(stored, source / SINGLE_NAME, metadata={"format": "pt"})
    checkpoint = open_checkpoint(optkit.quantize(source, out_dir=tmp_path / "out", group_size=32))
    assert "lm_head.weight" not in checkpoint.tensors
    assert checkpoint.shared


def test_a_separate_head_is_packed_and_a_separate_embedding_keeps_its_codes_beside(tmp_path):
    _, checkpoint = made(tmp_path)
    assert "lm_head.weight_packed" in checkpoint.tensors
    assert f"{EMBEDDING}.weight_packed" not in checkpoint.tensors
    assert (checkpoint.directory / CODES_NAME / SINGLE_NAME).is_file()
    assert facts(checkpoint)["tied"] == "separate"
    assert json.loads((checkpoint.directory / "config.json").read_text())["quantization_config"]["ignore"] == []


# what is quantized


def test_ignored_modules_stay_in_floating_point_and_transformers_is_told(tmp_path):
    source, checkpoint = made(tmp_path, ignore=("o_proj", "re:layers\\.0\\.mlp", "lm_head"))
    config = json.loads((checkpoint.directory / "config.json").read_text())["quantization_config"]
    kept = [n for n in linears(source.skeleton()) if n.endswith("o_proj") or "layers.0.mlp" in n] + ["lm_head"]
    assert sorted(config["ignore"]) == sorted(kept)
    assert sorted(facts(checkpoint)["floating"]) == sorted(kept)
    for name in kept:
        assert torch.equal(checkpoint.tensor_for(f"{name}.weight")(), source.tensor_for(f"{name}.weight")())


def test_gates_with_a_handful_of_outputs_are_left_alone(tmp_path):
    _, checkpoint = made(tmp_path, "qwen2_moe", group_size=16)
    assert "model.layers.0.mlp.shared_expert_gate" in facts(checkpoint)["floating"]
    assert torch.equal(logits(transformers_model(checkpoint.directory)), logits(checkpoint.load()))


def test_experts_pass_through_unchanged(tmp_path):
    """llm-compressor#2939: experts fused into three dimensions, corrupted without a word."""
    source, checkpoint = made(tmp_path, "qwen3_moe")
    names = [name for name, _ in source.skeleton().named_parameters() if ".experts." in name]
    assert len(names) == 4
    for name in names:
        assert torch.equal(checkpoint.tensor_for(name)(), source.tensor_for(name)())
    assert len(checkpoint.tensors.names()) < len(source.tensors.names()) * 3  # not stored in both layouts


def test_a_group_size_that_does_not_divide_is_refused_before_any_weight_is_read(tmp_path, monkeypatch):
    """compressed-tensors#447, AutoAWQ#602, GPTQModel#328, lmdeploy#1560, sglang#3571."""
    source = tiny.save("llama", tmp_path / "source", hidden_size=96, intermediate_size=192, head_dim=24)
    monkeypatch.setattr(store.TensorStore, "get", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(UsageError) as caught:
        optkit.quantize(source, out_dir=tmp_path / "out", group_size=64)
    text = str(caught.value)
    for layer in range(2):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            assert f"model.layers.{layer}.self_attn.{part}" in text
        assert f"layers.{layer}.mlp.gate_proj" in text
    assert "down_proj" not in text
    assert "96 inputs" in text
    assert "use 16 or 32, or channel" in text
    assert list(tmp_path.iterdir()) == [source]


def test_nothing_to_quantize_is_refused(tmp_path):
    with pytest.raises(UsageError, match="nothing is left to quantize"):
        made(tmp_path, ignore=("*",), embedding="keep", lm_head="keep")


def test_eight_bit_activations_beside_zero_points_are_refused(tmp_path):
    with pytest.raises(UsageError, match="asymmetric"):
        made(tmp_path, symmetric=False, lm_head="w8a8")


def test_an_odd_number_of_inputs_does_not_pack_into_nibbles(tmp_path):
    with pytest.raises(UsageError, match=r"layers\.0\.mlp\.down_proj.*even number|even number.*layers\.0\.mlp\.down_proj"):
        made(tmp_path, model={"intermediate_size": 77}, group_size="channel")


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_an_embedding_has_no_activations_to_quantize_and_takes_the_weights_part(tmp_path, name):
    _, checkpoint = made(tmp_path, name, scheme="w8a8", group_size=None)
    assert checkpoint.quantization[EMBEDDING] == QuantScheme(8, group_size=None)
    assert checkpoint.quantization["lm_head"].activation_bits == (16 if name == "llama_tied" else 8)
    assert checkpoint.quantization["model.layers.0.mlp.up_proj"].activation_bits == 8
    assert torch.equal(logits(transformers_model(checkpoint.directory)), logits(checkpoint.load()))


# the directory


def test_the_manifest_says_what_was_made_of_what_and_how_well(tmp_path):
    source, checkpoint = made(tmp_path)
    found = manifest.read_manifest(checkpoint.directory, "quantized-checkpoint")
    assert found.source == {"digest": source.digest, "given": str(source.directory)}
    assert found.recipe["quantize"]["group_size"] == 32
    assert found.model == checkpoint.spec
    assert {"torch", "transformers", "compressed-tensors"} <= set(found.versions)
    assert found.facts["schemes"]["model.layers.0.mlp.up_proj"] == "w4a16 g32 sym"
    layers = found.facts["layers"]
    assert set(layers) == set(checkpoint.quantization)
    for name, numbers in layers.items():
        weight = source.tensor_for(f"{name}.weight")()
        error = (dequantize(checkpoint.quantized(name)) - weight).square().sum() / weight.square().sum()
        assert numbers["relative_error"] == pytest.approx(error.item(), rel=1e-4)
        assert 15 < numbers["sqnr_db"] < 30
    manifest.check_files(checkpoint.directory, found, digests=True)


def test_tokenizer_and_head_dim_come_along(tmp_path):
    """Fast-LLM#102: head_dim lost on the way out."""
    source, checkpoint = made(tmp_path, "qwen3")
    assert (checkpoint.spec.head_dim, checkpoint.spec.num_kv_heads) == (32, 2)
    texts = [AutoTokenizer.from_pretrained(c.directory)("the end of it").input_ids for c in (source, checkpoint)]
    assert texts[0] == texts[1]


def test_a_tied_model_gets_smaller_by_what_its_bits_promise(tmp_path):
    """optimum#1326, optimum#2241, transformers#12985: a tied lm_head that made the result larger."""
    source, checkpoint = made(tmp_path, "llama_tied", model={"vocab_size": 2000})
    linear_bytes = sum(o * i for o, i in linears(source.skeleton()).values()) * (4 + 16 / 32) / 8
    table = 2000 * 64
    expected = linear_bytes + table * 2 + table * (4 + 16 / 32) / 8
    written = sum(path.stat().st_size for path in checkpoint.directory.rglob("*.safetensors"))
    assert written < 1.02 * expected + 12_000  # headers, norms


def test_the_same_input_gives_the_same_bytes(tmp_path):
    source = tiny.save("llama_tied", tmp_path / "source")
    for name in ("a", "b"):
        optkit.quantize(source, out_dir=tmp_path / name)
    for file in (SINGLE_NAME, f"{CODES_NAME}/{SINGLE_NAME}", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_many_small_shards_in_and_out(tmp_path, monkeypatch):
    source = tiny.save("llama", tmp_path / "source")
    stored = load_file(source / SINGLE_NAME)
    (source / SINGLE_NAME).unlink()
    store.write_shards(source, stored.items(), 30_000)
    monkeypatch.setattr(store, "SHARD_BYTES", 20_000)
    checkpoint = open_checkpoint(optkit.quantize(source, out_dir=tmp_path / "out"))
    assert (checkpoint.directory / INDEX_NAME).is_file()
    assert torch.equal(logits(transformers_model(checkpoint.directory)), logits(checkpoint.load()))


def test_an_earlier_result_is_replaced_and_something_else_is_not(tmp_path):
    source = tiny.save("llama", tmp_path / "source")
    out = optkit.quantize(source, out_dir=tmp_path / "out", scheme="w8a16", group_size=32)
    optkit.quantize(source, out_dir=out, group_size=32)
    assert open_checkpoint(out).quantization["lm_head"].num_bits == 4
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("do not delete")
    with pytest.raises(UsageError, match="not empty"):
        optkit.quantize(source, out_dir=other)
    assert (other / "thesis.txt").read_text() == "do not delete"


# bad input


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    source = tiny.save("llama", tmp_path / "source")

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "save_file", full)
    with pytest.raises(StorageError, match="no space left"):
        optkit.quantize(source, out_dir=tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


def test_a_failure_half_way_keeps_the_earlier_result(tmp_path, monkeypatch):
    source = tiny.save("llama", tmp_path / "source")
    out = optkit.quantize(source, out_dir=tmp_path / "out", group_size=32)
    before = (out / manifest.FILE_NAME).read_bytes()
    calls = []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) > 5:
            raise KeyboardInterrupt
        return {"relative_error": 0.0}

    monkeypatch.setattr(stage, "weight_error", failing)
    with pytest.raises(KeyboardInterrupt):
        optkit.quantize(source, out_dir=out, group_size=64)
    assert (out / manifest.FILE_NAME).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_missing_directory_and_truncated_weights_are_one_line_and_write_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        optkit.quantize(tmp_path / "nowhere", out_dir=tmp_path / "out")
    source = tiny.save("llama", tmp_path / "source")
    path = source / SINGLE_NAME
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="truncated"):
        optkit.quantize(source, out_dir=tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


def test_quantizing_twice_is_refused(tmp_path):
    _, checkpoint = made(tmp_path)
    with pytest.raises(UnsupportedError, match="quantized already"):
        optkit.quantize(checkpoint.directory, out_dir=tmp_path / "again")


def test_weights_that_are_not_finite_are_refused_by_layer(tmp_path):
    source = tiny.save("llama", tmp_path / "source")
    stored = load_file(source / SINGLE_NAME)
    stored["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(stored, source / SINGLE_NAME, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"model\.layers\.1\.mlp\.up_proj: has weights that are NaN"):
        optkit.quantize(source, out_dir=tmp_path / "out", group_size=32)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": math.nan}, "scale that is zero, NaN or infinite"),
        ({"scale": 0.0}, "scale that is zero, NaN or infinite"),
        ({"scheme": QuantScheme(8, group_size=32)}, "was quantized as w8a16 g32 sym, and the plan says w4a16 g32 sym"),
    ],
)
def test_a_method_whose_answer_cannot_be_right_is_caught(tmp_path, monkeypatch, change, message):
    """Model-Optimizer#20, llm-compressor#1928: scales that were never set."""
    honest = Rtn.quantize

    def wrong(self, module):
        quantized = honest(self, module)
        if "scale" in change:
            quantized.scale[3, 1] = change["scale"]
            return quantized
        return dataclasses.replace(quantized, **change)

    monkeypatch.setattr(Rtn, "quantize", wrong)
    with pytest.raises(VerificationError, match=message):
        made(tmp_path)
    assert not (tmp_path / "out").exists()


# memory and sudden death


BIG = """
import json, os, signal, sys, pathlib
import torch
import optkit
from optkit.checkpoint import store
from optkit.checkpoint.model import open_checkpoint

source, out, die_at = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
store.SHARD_BYTES = 16 << 20

def progress(text, done=None, total=None):
    if die_at and done == die_at:
        os.kill(os.getpid(), signal.SIGKILL)

def peak():  # not getrusage, whose maximum a child inherits from the process that started it
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

checkpoint = open_checkpoint(source)
checkpoint.skeleton()
before = peak()
optkit.quantize(checkpoint, None, out, progress, scale_search="minmax")
print(json.dumps({"before": before, "after": peak()}))
"""


def big_checkpoint(directory, layers=20, hidden=768):
    """A llama of about 220 MB in float16, in shards, without ever holding it."""
    directory.mkdir()
    config = tiny.config("llama_tied").to_dict()
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "num_attention_heads": 12}
    config.update(
        sizes, num_key_value_heads=12, head_dim=64, vocab_size=4096, architectures=["LlamaForCausalLM"], dtype="float16"
    )
    (directory / "config.json").write_text(json.dumps(config))
    skeleton = open_empty(directory)
    generator = torch.Generator().manual_seed(0)

    def stream():
        for name, parameter in skeleton.named_parameters():
            yield name, 0.05 * torch.randn(parameter.shape, generator=generator).half()

    (directory / SINGLE_NAME).unlink()
    store.write_shards(directory, stream(), 32 << 20)
    return sum(path.stat().st_size for path in directory.glob("*.safetensors")) / 2**20


def open_empty(directory):
    save_file({}, directory / SINGLE_NAME)
    return open_checkpoint(directory).skeleton()


def run_big(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(Path(optkit.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed leaves: measures what is held, not glibc's fragmentation
    command = [sys.executable, "-W", "ignore", "-c", BIG, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_memory_does_not_grow_with_the_model_and_a_killed_run_is_run_again(tmp_path):
    """llm-compressor#1119, #1183, optimum#852: out of memory, and hours of work lost with the process."""
    source, out = tmp_path / "source", tmp_path / "out"
    size = big_checkpoint(source)
    assert size > 180
    killed = run_big(source, out, 60)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    assert len(list(tmp_path.glob(".out.tmp-*"))) == 1
    finished = run_big(source, out, 0)
    assert finished.returncode == 0, finished.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    memory = json.loads(finished.stdout)
    largest = 4096 * 768 * 4 / 2**20  # the embedding in float32, MB
    assert memory["after"] - memory["before"] < 2 * 16 + 3 * largest < size / 2  # measured: 39


# how it is called


def test_a_recipe_is_an_object_a_mapping_or_options_and_options_win(tmp_path):
    source = open_checkpoint(tiny.save("llama", tmp_path / "source"))
    section = QuantizeRecipe(group_size=64)
    for recipe, options, expected in (
        (section, {}, 64),
        ({"group_size": 64}, {}, 64),
        (section, {"group_size": 32}, 32),
        ({"group_size": 64}, {"group_size": 32}, 32),
        (None, {}, 32),
    ):
        out = optkit.quantize(source, recipe, tmp_path / "out", **options)
        assert open_checkpoint(out).quantization["lm_head"].group_size == expected


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"groupsize": 32}, RecipeError, "did you mean 'group_size'"),
        ({"scheme": "w4a61"}, RecipeError, "did you mean 'w4a16'"),
        ({"tied": "shared"}, RecipeError, "did you mean 'share'"),
        ({"method": "magic"}, RecipeError, "'magic' is not known"),
    ],
)
def test_unknown_options_name_the_nearest(tmp_path, options, error, message):
    source = tiny.save("llama", tmp_path / "source")
    with pytest.raises(error, match=message):
        optkit.quantize(source, out_dir=tmp_path / "out", **options)


def test_a_method_that_is_not_installed_is_refused_before_any_work(monkeypatch):
    monkeypatch.setitem(stage.METHODS, "gptq", ("not_there", "Solver"))
    with pytest.raises(UnsupportedError, match="method 'gptq' is not available"):
        stage.load_method("gptq")
    with pytest.raises(UnsupportedError, match="'other' is not known"):
        stage.load_method("other")


def test_progress_is_reported_from_none_to_all(tmp_path):
    source, seen = tiny.save("llama", tmp_path / "source"), []
    optkit.quantize(source, out_dir=tmp_path / "out", progress=lambda *args: seen.append(args))
    counted = [args[1:] for args in seen if len(args) == 3]
    assert counted[0] == (0, 16)
    assert counted[-1] == (16, 16)
