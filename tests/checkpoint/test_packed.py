"""Checkpoints that other tools quantized: their own codes and scales, against packers written here from the formats'
descriptions, the ``gguf`` and ``compressed-tensors`` libraries, and transformers."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import nn

import optkit
from optkit.checkpoint import gguf_support
from optkit.checkpoint.affine import dequantize
from optkit.checkpoint.gguf_blocks import BLOCKS, SIZES, quantized_blocks
from optkit.checkpoint.model import linears, open_checkpoint
from optkit.errors import CheckpointError, UnsupportedError
from optkit.export.verify import Runner, open_exact
from optkit.io_spec import GraphSpec
from optkit.manifest import read_manifest
from tests import tiny

IDS = torch.arange(3, 27).reshape(2, 12)
# A float32 export of 4-bit weights against torch, relative to the logit range: other kernels, same weights.
EXPORT_ERROR = 1e-5


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / (want.max() - want.min()))


# ---------------------------------------------------------------------------------------------------- GGUF


def random_blocks(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Blocks of random bits whose float16 scales are ordinary numbers."""
    rng = np.random.default_rng(len(kind) + ord(kind[1]))
    size = SIZES[kind][1]
    data = rng.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
    halves |= dict.fromkeys(("Q4_K", "Q5_K"), (0, 2))
    for at in halves.get(kind, (0,)):
        data[:, at : at + 2] = (rng.standard_normal((rows * blocks, 1)) / 50).astype(np.float16).view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_blocks_are_the_weights_that_the_gguf_library_reads(kind):
    data = random_blocks(kind, 6, 4)
    expected = gguf.quants.dequantize(data, Kind[kind])
    got = dequantize(quantized_blocks(data, kind)).numpy()
    assert np.abs(expected).max() > 0.05
    np.testing.assert_allclose(got, expected, rtol=0, atol=3e-7 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0", "Q3_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_blocks_without_an_offset_are_the_same_bit_for_bit(kind):
    data = random_blocks(kind, 6, 4)
    np.testing.assert_array_equal(dequantize(quantized_blocks(data, kind)).numpy(), gguf.quants.dequantize(data, Kind[kind]))


def write_gguf(path: Path, kind: str, architecture: str = "llama") -> Path:
    """Two layers with every matrix in blocks of ``kind``; grouped-query attention, so that q and k are reordered apart."""
    hidden, heads, kv_heads, middle, vocabulary = 256, 4, 2, 256, 64
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(2)
    writer.add_feed_forward_length(middle)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(chr(48 + i) for i in range(vocabulary - 5)), "01", "<s>", "</s>", "<unk>", "<pad>"])
    writer.add_token_types([1] * (vocabulary - 4) + [3] * 4)
    writer.add_token_merges(["0 1"])
    writer.add_bos_token_id(vocabulary - 4)
    writer.add_eos_token_id(vocabulary - 3)
    shapes = {"token_embd": (vocabulary, hidden), "output": (vocabulary, hidden)}
    rng = np.random.default_rng(0)

    def vector(size: int, low: float, high: float) -> np.ndarray:
        """Numbers that float16 holds, for transformers rounds everything to it; small, so that attention stays smooth."""
        return rng.uniform(low, high, size).astype(np.float16).astype(np.float32)

    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(2):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", vector(hidden, 0.05, 0.15))
        rows = {"attn_q": hidden, "attn_k": hidden // 2, "attn_v": hidden // 2, "attn_output": hidden}
        rows |= {"ffn_gate": middle, "ffn_up": middle, "ffn_down": hidden}
        shapes |= {f"blk.{layer}.{name}": (count, hidden) for name, count in rows.items()}
        if architecture == "qwen2":
            for name, count in list(rows.items())[:3]:
                writer.add_tensor(f"blk.{layer}.{name}.bias", vector(count, -0.3, 0.3))
    for name, (rows_of, columns) in shapes.items():
        data = random_blocks(kind, rows_of, columns // SIZES[kind][0])
        writer.add_tensor(f"{name}.weight", data, raw_dtype=Kind[kind])
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    return path


@pytest.mark.parametrize(("kind", "architecture"), [("Q4_0", "llama"), ("Q4_1", "qwen2"), ("Q8_0", "llama"), ("Q4_K", "llama")])
def test_a_gguf_model_is_the_one_transformers_dequantizes(tmp_path, kind, architecture):
    path = write_gguf(tmp_path / "m.gguf", kind, architecture)
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.quantization.values()) == {BLOCKS[kind].scheme}
    assert len(checkpoint.quantization) == 2 * 7 + 2
    (tmp_path / "theirs").mkdir()
    gguf_support.write_floating(path, tmp_path / "theirs")
    theirs = logits(open_checkpoint(tmp_path / "theirs").load())
    assert relative(logits(checkpoint.load()), theirs) < 2e-3
    assert relative(logits(checkpoint.dequantized(torch.float32).load()), logits(checkpoint.load())) < 1e-6
    assert relative(logits(checkpoint.dequantized().load()), theirs) < 1e-6


@pytest.mark.parametrize("target", ["ort", "onnx"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q4_K"])
def test_a_gguf_model_is_exported_with_its_own_codes(tmp_path, kind, target):
    path = write_gguf(tmp_path / "m.gguf", kind)
    facts = read_manifest(optkit.export(path, {"target": target}, tmp_path / "out")).facts
    assert max(facts["verified"]["logit_error"].values()) < EXPORT_ERROR
    assert facts["audit"]["bytes"]["within_limit"], facts["audit"]["bytes"]


def test_a_gguf_model_is_quantized_anew(tmp_path):
    """The demo starts from a GGUF file; anything else that is quantized already is refused."""
    path = write_gguf(tmp_path / "m.gguf", "Q8_0")
    out = optkit.quantize(path, {"scheme": "w4a16", "group_size": 32, "embedding": "keep"}, tmp_path / "q")
    again = open_checkpoint(out)
    assert {scheme.num_bits for scheme in again.quantization.values()} == {4}
    assert relative(logits(again.load()), logits(open_checkpoint(path).load())) < 0.5
    with pytest.raises(UnsupportedError, match="quantized already"):
        optkit.quantize(out, {"scheme": "w4a16"}, tmp_path / "again")


# ---------------------------------------------------------------------------------------------------- GPTQ and AWQ


def words(codes: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes into int32 words along ``axis``, the first in the lowest bits, or ``order[j]`` in the j-th place."""
    moved = np.moveaxis(codes.astype(np.uint64), axis, -1)
    parts = moved.reshape(*moved.shape[:-1], -1, 32 // bits)[..., list(order or range(32 // bits))]
    packed = (parts << (bits * np.arange(32 // bits, dtype=np.uint64))).sum(-1).astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed, -1, axis)))


class Foreign:
    """A tiny llama some other tool quantized: its directory and the float model with the same weights."""

    def __init__(self, directory: Path, bits: int = 4, group: int = 32, symmetric: bool = False) -> None:
        self.directory, self.bits, self.group, self.symmetric = directory, bits, group, symmetric
        tiny.save("llama", directory)
        self.model = tiny.build("llama")
        self.tensors = load_file(directory / "model.safetensors")
        rng = np.random.default_rng(1)
        self.parts = {}
        for name, (outputs, inputs) in linears(self.model).items():
            groups = inputs // group
            codes = rng.integers(0, 2**bits, (outputs, inputs))
            zeros = np.full((outputs, groups), 2 ** (bits - 1)) if symmetric else rng.integers(0, 2**bits, (outputs, groups))
            scales = (rng.uniform(0.5, 1.5, (outputs, groups)) * 0.3 / 2**bits).astype(np.float16)
            self.parts[name] = codes, zeros, scales

    def place(self) -> None:
        """Gives the float model the same weights."""
        for name, (codes, zeros, scales) in self.parts.items():
            at = self.groups_of(codes)
            weight = (codes - zeros[:, at]).astype(np.float32) * scales[:, at].astype(np.float32)
            module = self.model.get_submodule(name)
            assert isinstance(module, nn.Linear)
            module.weight.data = torch.from_numpy(weight)
            del self.tensors[f"{name}.weight"]

    def groups_of(self, codes: np.ndarray) -> np.ndarray:
        """The group of each input, ``[I]``."""
        return np.arange(codes.shape[1]) // self.group

    def write(self, **quantization_config: object) -> Path:
        save_file({k: v.contiguous() for k, v in self.tensors.items()}, self.directory / "model.safetensors", {"format": "pt"})
        file = self.directory / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization_config}))
        return self.directory


def write_gptq(directory: Path, version: str = "gptq", index: bool = False, **options) -> Foreign:
    made = Foreign(directory, **options)
    made.place()
    for name, (codes, zeros, scales) in made.parts.items():
        packed = words(zeros, made.bits, 0)  # along the outputs, [O/p, G]
        if version == "gptq":
            ones = sum(1 << (made.bits * i) for i in range(32 // made.bits))
            packed = torch.from_numpy((packed.numpy().view(np.uint32) - np.uint32(ones)).view(np.int32))
        made.tensors |= {
            f"{name}.qweight": words(codes.T, made.bits, 0),
            f"{name}.qzeros": packed.t().contiguous(),
            f"{name}.scales": torch.from_numpy(scales.T.copy()),
        }
        if index:  # writers store it also where the inputs are in their order
            made.tensors[f"{name}.g_idx"] = torch.from_numpy(made.groups_of(codes).astype(np.int32))
    config = {"bits": made.bits, "group_size": made.group, "sym": made.symmetric, "desc_act": index}
    made.write(quant_method="gptq", checkpoint_format=version, **config)
    return made


def write_awq(directory: Path, **options) -> Foreign:
    made = Foreign(directory, **options)
    made.place()
    for name, (codes, zeros, scales) in made.parts.items():
        made.tensors |= {
            f"{name}.qweight": words(codes.T, 4, 1, (0, 2, 4, 6, 1, 3, 5, 7)),
            f"{name}.qzeros": words(zeros.T, 4, 1, (0, 2, 4, 6, 1, 3, 5, 7)),
            f"{name}.scales": torch.from_numpy(scales.T.copy()),
        }
    made.write(quant_method="awq", version="gemm", bits=4, group_size=made.group, zero_point=True)
    return made


def write_compressed(directory: Path, **options) -> Foreign:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    made = Foreign(directory, **options)
    made.place()
    middle = 2 ** (made.bits - 1)
    for name, (codes, zeros, scales) in made.parts.items():
        made.tensors |= {
            f"{name}.weight_packed": pack_to_int32(torch.from_numpy(codes - middle).to(torch.int8), made.bits),
            f"{name}.weight_shape": torch.tensor(codes.shape),
            f"{name}.weight_scale": torch.from_numpy(scales),
        }
        if not made.symmetric:
            signed = torch.from_numpy(zeros - middle).to(torch.int8)
            made.tensors[f"{name}.weight_zero_point"] = pack_to_int32(signed, made.bits, packed_dim=0)
    weights = {"num_bits": made.bits, "type": "int", "symmetric": made.symmetric, "strategy": "group", "group_size": made.group}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    made.write(quant_method="compressed-tensors", format="pack-quantized", config_groups={"group_0": group}, ignore=["lm_head"])
    return made


WRITERS = {"gptq": write_gptq, "awq": write_awq, "compressed-tensors": write_compressed}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("gptq", {}),
        ("gptq", {"version": "gptq_v2"}),
        ("gptq", {"symmetric": True}),
        ("gptq", {"bits": 8, "group": 16}),
        ("gptq", {"index": True}),
        ("awq", {}),
        ("awq", {"group": 16}),
        ("compressed-tensors", {}),
        ("compressed-tensors", {"symmetric": True}),
        ("compressed-tensors", {"bits": 8}),
    ],
    ids=str,
)
def test_the_weights_are_codes_and_scales_as_stored(tmp_path, method, options):
    made = WRITERS[method](tmp_path / "m", **options)
    checkpoint = open_checkpoint(made.directory)
    assert set(checkpoint.quantization) == set(made.parts)
    for name, (codes, zeros, scales) in made.parts.items():
        got = checkpoint.quantized(name)
        np.testing.assert_array_equal(got.codes.numpy(), codes)
        np.testing.assert_array_equal(got.scale.numpy(), scales)
        if not made.symmetric:
            np.testing.assert_array_equal(got.zero_point.numpy(), zeros)
    assert relative(logits(checkpoint.load()), logits(made.model)) < 1e-6


@pytest.mark.parametrize("target", ["ort", "onnx"])
@pytest.mark.parametrize("method", list(WRITERS))
def test_the_export_holds_the_same_weights(tmp_path, method, target):
    made = WRITERS[method](tmp_path / "m")
    artifact = optkit.export(made.directory, {"target": target}, tmp_path / "out")
    facts = read_manifest(artifact).facts
    assert max(facts["verified"]["logit_error"].values()) < EXPORT_ERROR
    assert facts["audit"]["bytes"]["within_limit"], facts["audit"]["bytes"]
    runner = Runner(open_exact(artifact / "model.onnx"), GraphSpec.from_dict(facts["graph"]), len(IDS), 16)
    got = runner.step(IDS.tolist(), list(range(IDS.shape[1])))
    assert relative(torch.from_numpy(got), logits(made.model)) < EXPORT_ERROR


@pytest.mark.parametrize("method", list(WRITERS))
def test_tensorrt_takes_the_symmetric_ones_and_says_so_of_the_others(tmp_path, method):
    made = WRITERS[method](tmp_path / "asymmetric")
    with pytest.raises(UnsupportedError, match=r"(?s)symmetric"):
        optkit.export(made.directory, {"target": "tensorrt"}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    if method != "awq":
        made = WRITERS[method](tmp_path / "symmetric", symmetric=True)
        facts = read_manifest(optkit.export(made.directory, {"target": "tensorrt"}, tmp_path / "out")).facts
        assert max(facts["verified"]["logit_error"].values()) < EXPORT_ERROR


def test_activation_order_is_refused_by_name(tmp_path):
    rng = np.random.default_rng(0)
    index = np.arange(64) // 32
    rng.shuffle(index)
    made = Foreign(tmp_path / "m")
    made.place()
    name = next(name for name, (codes, _, _) in made.parts.items() if codes.shape[1] == 64)
    codes, zeros, scales = made.parts[name]
    made.tensors |= {
        f"{name}.qweight": words(codes.T, 4, 0),
        f"{name}.qzeros": words(zeros, 4, 0).t().contiguous(),
        f"{name}.scales": torch.from_numpy(scales.T.copy()),
        f"{name}.g_idx": torch.from_numpy(index.astype(np.int32)),
    }
    made.write(quant_method="gptq", bits=4, group_size=32, sym=False, desc_act=True, checkpoint_format="gptq_v2")
    with pytest.raises(UnsupportedError, match=rf"{name}.*activation order.*desc_act false"):
        open_checkpoint(made.directory)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, r"marlin.*before it was repacked"),
        ({"quant_method": "awq", "version": "gemv"}, r"gemv"),
        ({"quant_method": "bitsandbytes"}, r"bitsandbytes.*reads compressed-tensors, gptq, awq and GGUF"),
    ],
)
def test_layouts_that_are_not_read_are_named_with_the_remedy(tmp_path, config, message):
    directory = write_gptq(tmp_path / "m").directory
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(directory)


def test_the_other_version_of_gptq_is_found_out_where_zero_points_are_known(tmp_path):
    """AutoGPTQ stored zero points minus one and GPTQModel's second version does not: read as the other, all weights are off."""
    directory = write_gptq(tmp_path / "m", "gptq_v2", symmetric=True).directory
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq"
    file.write_text(json.dumps(config))
    checkpoint = open_checkpoint(directory)
    with pytest.raises(CheckpointError, match=r"qzeros: .*checkpoint_format"):
        checkpoint.load()
