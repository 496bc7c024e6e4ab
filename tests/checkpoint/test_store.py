"""Safetensors shards read and written one tensor at a time, and the compressed-tensors layout checked by its own library."""

import errno
import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file

from optkit.checkpoint import affine, store
from optkit.checkpoint.compressed import read_quantized, stored_schemes
from optkit.checkpoint.formats import open_packed
from optkit.checkpoint.store import TensorStore, pack_for_store, quantization_config
from optkit.errors import CheckpointError, StorageError, UnsupportedError, storage_errors
from optkit.scheme import QuantScheme

W4 = QuantScheme(4, group_size=32)
W4_ASYM = QuantScheme(4, symmetric=False, group_size=32)
W8 = QuantScheme(8, group_size=64)
W8_CHANNEL = QuantScheme(8, group_size=None)
W8A8 = QuantScheme(8, group_size=None, activation_bits=8)
W8A8_STATIC = QuantScheme(8, group_size=None, activation_bits=8, dynamic_activations=False)
SCHEMES = [W4, W4_ASYM, W8, QuantScheme(8, symmetric=False, group_size=64), W8_CHANNEL, W8A8, W8A8_STATIC]


def tensors():
    generator = torch.Generator().manual_seed(0)
    made = {
        f"layer.{i}.{name}": torch.randn(7, 5, generator=generator).to(dtype)
        for i, (name, dtype) in enumerate([("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)])
    }
    whole = {"i8": torch.int8, "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64, "bool": torch.bool}
    made.update({name: torch.randint(0, 2, (3, 4), generator=generator).to(dtype) for name, dtype in whole.items()})
    made["scalar"] = torch.tensor(3.5)
    made["empty"] = torch.empty(0, 4)
    return made


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a, b)


def quantized(scheme, rows=12, inputs=192, seed=0):
    weight = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)) + 0.2
    whole = affine.quantize(weight, *affine.range_scale(weight, scheme), scheme)
    if scheme.dynamic_activations:
        return whole
    return affine.QuantizedWeight(whole.codes, whole.scale, None, scheme, torch.tensor(0.02))


def test_every_tensor_reads_as_safetensors_reads_it(tmp_path):
    save_file(tensors(), tmp_path / store.SINGLE_NAME)
    opened = TensorStore.open(tmp_path)
    expected = load_file(tmp_path / store.SINGLE_NAME)
    assert sorted(opened.names()) == sorted(expected)
    for name, tensor in expected.items():
        assert same(opened.get(name), tensor), name
        assert (opened.shape(name), opened.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert opened.nbytes(name) == tensor.numel() * tensor.element_size()


def test_a_tensor_that_is_read_is_a_copy(tmp_path):
    save_file({"a": torch.zeros(4)}, tmp_path / store.SINGLE_NAME)
    opened = TensorStore.open(tmp_path)
    opened.get("a").add_(1)
    assert torch.equal(opened.get("a"), torch.zeros(4))


@pytest.mark.parametrize("shard_bytes", [1, 150, 10**9])
def test_shards_hold_every_tensor_once_and_no_more_than_asked(tmp_path, shard_bytes):
    names = store.write_shards(tmp_path, tensors().items(), shard_bytes)
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == sorted(names)
    assert not list(tmp_path.glob("*.part"))
    opened = TensorStore.open(tmp_path)
    for name, tensor in tensors().items():
        assert same(opened.get(name), tensor), name
    assert len(opened) == len(tensors())
    for file in names:
        held = load_file(tmp_path / file)
        sizes = [t.numel() * t.element_size() for t in held.values()]
        assert len(sizes) == 1 or sum(sizes) <= shard_bytes
    if shard_bytes < 10**9:
        index = json.loads((tmp_path / store.INDEX_NAME).read_text())
        assert index["metadata"]["total_size"] == sum(opened.nbytes(name) for name in opened.names())
        assert sorted(set(index["weight_map"].values())) == sorted(names)


def test_writing_holds_one_shard_at_most(tmp_path):
    """llm-compressor#1119, #1183: out of memory while saving."""
    alive, most = 0, 0

    class Tracked(torch.Tensor):
        def __del__(self):
            nonlocal alive
            alive -= 1

    def stream():
        nonlocal alive, most
        for i in range(40):
            alive += 1
            most = max(most, alive)
            yield f"t{i}", torch.zeros(100).as_subclass(Tracked)

    store.write_shards(tmp_path, stream(), shard_bytes=4 * 100 * 4)
    assert most <= 4 + 2
    assert len(TensorStore.open(tmp_path)) == 40


@pytest.mark.parametrize("cut", [4, 60, -1])
def test_a_truncated_file_is_refused_by_name_when_opened(tmp_path, cut):
    path = tmp_path / store.SINGLE_NAME
    save_file(tensors(), path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated"):
        TensorStore.open(tmp_path)


def header(path, content, data=b""):
    path.write_bytes(len(content).to_bytes(8, "little") + content + data)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"{nonsense", CheckpointError, "header is damaged"),
        (b'{"a": 3}', CheckpointError, "damaged at a"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', CheckpointError, "do not make F32"),
        (b'{"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}', UnsupportedError, "data type F4"),
    ],
)
def test_a_damaged_header_is_refused_by_name(tmp_path, content, error, message):
    header(tmp_path / store.SINGLE_NAME, content, bytes(16))
    with pytest.raises(error, match=message):
        TensorStore.open(tmp_path)


def test_a_missing_shard_a_damaged_index_and_a_broken_promise_are_refused_by_name(tmp_path):
    store.write_shards(tmp_path, tensors().items(), 100)
    index = tmp_path / store.INDEX_NAME
    good = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {**good["weight_map"], "ghost": next(iter(good["weight_map"].values()))}}))
    with pytest.raises(CheckpointError, match="promises ghost"):
        TensorStore.open(tmp_path)
    index.write_text(json.dumps(good))
    shard = next(tmp_path.glob("model-00002*"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-\d+\.safetensors: missing"):
        TensorStore.open(tmp_path)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match=r"index\.json: damaged"):
        TensorStore.open(tmp_path)


def test_a_directory_without_safetensors_says_what_is_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="safetensors weights only"):
        TensorStore.open(tmp_path)


def test_a_full_disk_is_a_storage_error(tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "save_file", full)
    with pytest.raises(StorageError, match="no space left"), storage_errors(tmp_path):
        store.write_shards(tmp_path, tensors().items())


# compressed-tensors


@pytest.mark.parametrize("shape", [(12, 192), (5, 64), (1, 192), (9, 320)], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)
def test_stored_codes_come_back_bit_for_bit(tmp_path, scheme, shape):
    """onnxruntime#19450: zero points, with an odd number of groups and rows among them."""
    whole = quantized(scheme, *shape)
    store.write_shards(tmp_path, [(f"m.{leaf}", tensor) for leaf, tensor in pack_for_store(whole).items()])
    back = read_quantized(TensorStore.open(tmp_path), "m", scheme)
    assert same(back.codes, whole.codes)
    assert torch.equal(back.scale.float(), whole.scale)
    assert back.scale.dtype == (torch.float16 if scheme.symmetric else torch.float32)
    assert (whole.zero_point is None) == (back.zero_point is None)
    assert whole.zero_point is None or same(back.zero_point, whole.zero_point)
    assert whole.input_scale is None or torch.equal(back.input_scale, whole.input_scale)


@pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)
def test_the_library_decompresses_our_tensors_to_our_weights(scheme):
    whole = quantized(scheme)
    assert bool((whole.scale < 0).any()) == (scheme.symmetric and scheme.num_bits == 4)
    config = QuantizationConfig.model_validate(quantization_config({"m": scheme}))
    group = config.config_groups["group_0"]
    tensors = pack_for_store(whole)
    tensors["weight_scale"] = tensors["weight_scale"].float()
    theirs = BaseCompressor.get_value_from_registry(group.format).decompress(tensors, group)["weight"]
    assert torch.equal(theirs.float(), affine.dequantize(whole))


@pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)
def test_the_library_compresses_our_weights_to_our_tensors(scheme):
    whole = quantized(scheme)
    group = QuantizationConfig.model_validate(quantization_config({"m": scheme})).config_groups["group_0"]
    state = {"weight": affine.dequantize(whole), "weight_scale": whole.scale}
    middle = scheme.zero_point
    points = torch.full_like(whole.scale, middle) if whole.zero_point is None else whole.zero_point
    state["weight_zero_point"] = (points.to(torch.int16) - middle).to(torch.int8)
    theirs = BaseCompressor.get_value_from_registry(group.format).compress(state, group)
    ours = pack_for_store(whole)
    for leaf in ("weight_packed", "weight", "weight_shape", "weight_zero_point"):
        assert (leaf in ours) == (leaf in theirs), leaf
        assert leaf not in ours or torch.equal(ours[leaf].to(theirs[leaf].dtype), theirs[leaf]), leaf


def test_codes_that_do_not_fit_their_scheme_are_refused_by_name(tmp_path):
    made = pack_for_store(quantized(W4))
    made["weight_scale"] = made["weight_scale"][:, :3]
    store.write_shards(tmp_path, [(f"m.{leaf}", tensor) for leaf, tensor in made.items()])
    with pytest.raises(CheckpointError, match="m: its stored tensors do not fit w4a16 g32 sym"):
        read_quantized(TensorStore.open(tmp_path), "m", W4)


def test_reordered_groups_are_refused(tmp_path):
    made = {**pack_for_store(quantized(W4)), "weight_g_idx": (torch.arange(192) % 6).int()}
    store.write_shards(tmp_path, [(f"m.{leaf}", tensor) for leaf, tensor in made.items()])
    with pytest.raises(UnsupportedError, match="activation order"):
        read_quantized(TensorStore.open(tmp_path), "m", W4)


# quantization_config


@pytest.mark.parametrize(
    ("schemes", "form"),
    [
        ({"a": W4, "b": W4}, "pack-quantized"),
        ({"a": W4, "b": W4_ASYM, "c": W8}, "pack-quantized"),
        ({"a": W8A8, "b": W8A8_STATIC}, "int-quantized"),
        ({"a": W4, "b": W8A8, "c": W4}, "mixed-precision"),
    ],
)
def test_a_config_says_every_module_s_scheme_and_the_library_accepts_it(tmp_path, schemes, form):
    config = quantization_config(schemes, ["lm_head", "gate"])
    assert config["format"] == form
    assert config["ignore"] == ["gate", "lm_head"]
    assert QuantizationConfig.model_validate(config).quantization_status.value == "compressed"
    assert config.get("dequantize", False) == any(not scheme.symmetric for scheme in schemes.values())
    made = [(f"{m}.{leaf}", t) for m, scheme in schemes.items() for leaf, t in pack_for_store(quantized(scheme)).items()]
    store.write_shards(tmp_path, made)
    assert stored_schemes(json.loads(json.dumps(config)), TensorStore.open(tmp_path)) == schemes


def test_a_scheme_of_few_modules_names_them_so_that_it_wins_over_the_class():
    config = quantization_config({"a": W4, "b": W8, "c": W4})
    targets = [group["targets"] for group in config["config_groups"].values()]
    assert targets == [["b"], ["Linear"]]


def test_expressions_and_globs_of_other_writers_are_understood(tmp_path):
    config = quantization_config({"x": W8})
    config["config_groups"] = {
        "group_0": {**quantization_config({"x": W4})["config_groups"]["group_0"], "targets": ["re:.*down_proj$"]},
        "group_1": config["config_groups"]["group_0"],
    }
    modules = {"model.layers.0.mlp.down_proj": W4, "model.layers.0.mlp.up_proj": W8}
    made = [(f"{m}.{leaf}", t) for m, scheme in modules.items() for leaf, t in pack_for_store(quantized(scheme)).items()]
    store.write_shards(tmp_path, made)
    assert stored_schemes(config, TensorStore.open(tmp_path)) == modules


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}, "8-bit float weights by tensor"),
        ({"weights": {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 32}}, "3-bit"),
    ],
)
def test_what_is_not_integer_four_or_eight_bit_is_refused(tmp_path, change, message):
    config = quantization_config({"m": W4})
    if "weights" in change:
        config["config_groups"]["group_0"]["weights"] = change["weights"]
    else:
        config.update(change)
    store.write_shards(tmp_path, [(f"m.{leaf}", t) for leaf, t in pack_for_store(quantized(W4)).items()])
    with pytest.raises(UnsupportedError, match=message):
        open_packed(config, TensorStore.open(tmp_path))


def test_storable_takes_the_first_type_that_holds_the_values_exactly():
    exact, inexact = torch.tensor([0.5, -3.0]), torch.tensor([0.1])
    assert store.storable(exact, torch.float16).dtype == torch.float16
    assert store.storable(inexact, torch.float16).dtype == torch.float32
    assert store.storable(torch.tensor([70000.0]), torch.float16, torch.bfloat16).dtype == torch.float32
    assert store.storable(torch.tensor([65536.0]), torch.float16, torch.bfloat16).dtype == torch.bfloat16
