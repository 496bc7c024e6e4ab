"""Target gguf: the file holds the checkpoint's own codes, reads back as the same model, and says what llama.cpp needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, GgufConfig

from optkit import manifest
from optkit.checkpoint.affine import QuantizedWeight, dequantize, range_scale
from optkit.checkpoint.affine import quantize as to_codes
from optkit.checkpoint.gguf_blocks import block_type, quantized_blocks, to_blocks
from optkit.checkpoint.gguf_file import read_gguf
from optkit.checkpoint.model import open_checkpoint
from optkit.cli import cli
from optkit.errors import UnsupportedError, UsageError, VerificationError
from optkit.export import gguf as under_test
from optkit.export.gguf_vocabulary import BYTE, CONTROL, NORMAL, UNUSED, vocabulary
from optkit.export.run import export
from optkit.quantize.run import quantize
from optkit.scheme import QuantScheme
from tests import tiny

SCHEMES: dict[str, dict[str, Any]] = {
    "Q4_0": {"scheme": "int4", "group_size": 32},
    "Q4_1": {"scheme": "int4", "group_size": 64, "symmetric": False},
    "Q8_0": {"scheme": "int8"},
}


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(5, tiny.VOCAB, (2, 24), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        return torch.as_tensor(model(input_ids=ids, use_cache=False).logits)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / (b.max() - b.min()))


@pytest.mark.parametrize("kind", SCHEMES)
def test_blocks_are_the_codes_and_the_gguf_library_reads_the_same_weights(kind: str) -> None:
    """Public report: auto-round#1948: the packed format is worse than the rounded weights."""
    options = SCHEMES[kind]
    scheme = QuantScheme(
        8 if kind == "Q8_0" else 4, group_size=options.get("group_size"), symmetric=options.get("symmetric", True)
    )
    weight = torch.randn(12, 128, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    weight[4:] = -weight[4:].abs() - 3  # zero point 15: offsets of more bits than float16 has
    quantized = to_codes(weight, *range_scale(weight, scheme), scheme)
    data, rounded = to_blocks(quantized)
    assert block_type(scheme, 128) == kind
    read = quantized_blocks(data, kind)
    assert torch.equal(read.codes, quantized.codes)
    theirs = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    if kind == "Q4_1":
        assert rounded > 0
        assert float((torch.from_numpy(theirs) - dequantize(quantized)).abs().max()) < 2**-11 * 8
    else:
        assert rounded == 0
        assert np.array_equal(theirs, dequantize(quantized).numpy())


@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        (QuantScheme(8, group_size=32, symmetric=False), "symmetric: true"),
        (QuantScheme(4, group_size=16), "groups of 16"),
        (QuantScheme(8, activation_bits=8), "w8a16"),
    ],
)
def test_what_no_block_holds_is_refused(scheme: QuantScheme, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        block_type(scheme, 64)


def test_a_scale_beyond_float16_is_refused() -> None:
    scheme = QuantScheme(4, group_size=32)
    huge = QuantizedWeight(torch.zeros(1, 32, dtype=torch.uint8), torch.tensor([[1e6]]), None, scheme)
    with pytest.raises(UnsupportedError, match="float16"):
        to_blocks(huge)


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_quantized_model_is_the_same_model_in_the_file(family: str, kind: str, tmp_path: Path) -> None:
    source = quantize(tiny.save(family, tmp_path / "hf"), out_dir=tmp_path / "q", method="rtn", **SCHEMES[kind])
    out = export(source, out_dir=tmp_path / "out", target="gguf")
    facts = manifest.read_manifest(out).facts
    assert set(facts["types"]) == {kind}
    found = open_checkpoint(out / "model.gguf")
    error = relative(logits(found.load()), logits(open_checkpoint(source).load()))
    assert error < (1e-2 if facts["rounded"] else 1e-5)
    assert bool(facts["rounded"]) == (kind == "Q4_1")
    again = export(found, out_dir=tmp_path / "again", target="gguf")
    assert (again / "model.gguf").read_bytes() == (out / "model.gguf").read_bytes(), "a file's own blocks are kept"


@pytest.mark.parametrize("family", ["llama_tied", "qwen2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_transformers_reads_the_floating_point_file_as_the_same_model(family: str, dtype: str, tmp_path: Path) -> None:
    source = tiny.save(family, tmp_path / "hf")
    out = export(source, out_dir=tmp_path / "out", target="gguf", dtype=dtype)
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        str(out), gguf_file="model.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    assert relative(logits(theirs), logits(open_checkpoint(source).load())) < (1e-5 if dtype == "fp32" else 5e-2)


@pytest.mark.parametrize("family", ["llama_linear", "llama_yarn"])
def test_rotary_scaling_is_in_the_file(family: str, tmp_path: Path) -> None:
    source = tiny.save(family, tmp_path / "hf")
    rope = dict(open_checkpoint(source).config.rope_parameters)
    out = export(source, out_dir=tmp_path / "out", target="gguf")
    assert read_gguf(out / "model.gguf").of_model("rope.scaling.type") == rope["rope_type"]


def test_llama_3_s_scaling_is_a_divisor_for_each_frequency(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    source = tiny.save("llama", tmp_path / "hf", rope_parameters={**rope, "original_max_position_embeddings": 8192})
    out = export(source, out_dir=tmp_path / "out", target="gguf")
    stored = next(t for t in gguf.GGUFReader(out / "model.gguf").tensors if t.name == "rope_freqs.weight").data
    assert float(stored[0]) == 1.0
    assert float(stored[-1]) == pytest.approx(8.0)
    assert relative(logits(open_checkpoint(out / "model.gguf").load()), logits(open_checkpoint(source).load())) < 1e-5


@pytest.mark.parametrize(
    ("family", "options", "error", "why"),
    [
        ("gemma2", {}, UnsupportedError, "model_type 'gemma2'"),
        ("mistral", {}, UnsupportedError, "a window of 8 tokens"),
        ("llama", {"opset": 24}, UsageError, "no ONNX graph"),
        ("llama", {"max_seq_len": 100000}, UsageError, "256 positions"),
    ],
)
def test_what_the_format_does_not_say_is_refused(
    family: str, options: dict[str, Any], error: type[Exception], why: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=why):
        export(tiny.save(family, tmp_path / "hf"), out_dir=tmp_path / "out", target="gguf", **options)
    assert not (tmp_path / "out").exists()


def test_a_file_that_answers_otherwise_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "file_rows", lambda rows, heads: torch.arange(rows))
    with pytest.raises(VerificationError, match="logits differ"):
        export(tiny.save("llama", tmp_path / "hf"), out_dir=tmp_path / "out", target="gguf")
    assert not (tmp_path / "out").exists()


def test_the_command_writes_a_directory_that_the_others_open(tmp_path: Path) -> None:
    source = tiny.save("llama", tmp_path / "hf")
    run = CliRunner().invoke(cli, ["export", str(source), "--target", "gguf", "--dtype", "fp16", "-o", str(tmp_path / "out")])
    assert run.exit_code == 0, run.output
    wanted = CliRunner().invoke(cli, ["generate", str(source), "--prompt", "a", "--max-new-tokens", "5"])
    opened = CliRunner().invoke(cli, ["generate", str(tmp_path / "out"), "--prompt", "a", "--max-new-tokens", "5"])
    assert opened.exit_code == 0, opened.output
    assert opened.stdout == wanted.stdout
    (tmp_path / "out" / "model.gguf").write_bytes(b"GGUF")
    damaged = CliRunner().invoke(cli, ["generate", str(tmp_path / "out"), "--prompt", "a"])
    assert damaged.exit_code != 0
    assert "model.gguf" in str(damaged.exception)


# ---- tokenizers


def tokenizer_json(directory: Path, **changes: Any) -> Path:
    tiny.tokenizer().save_pretrained(directory)
    path = directory / "tokenizer.json"
    described = json.loads(path.read_text())
    for key, value in changes.items():
        described[key] = {**described[key], **value} if key == "model" else value
    path.write_text(json.dumps(described))
    return directory


SPEC = manifest.ModelSpec("llama", 1, 8, tiny.VOCAB + 3, 1, 1, 8, 64, bos_token_id=1, eos_token_ids=(2, 3))
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split(pattern: str) -> dict[str, Any]:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [step, LEVEL]}


DIGITS = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, {**LEVEL, "use_regex": True}],
}


@pytest.mark.parametrize(
    ("pre", "ignore_merges", "name"),
    [
        ({**LEVEL, "use_regex": True}, False, "gpt-2"),
        (DIGITS, False, "smollm"),
        (split(QWEN2), False, "qwen2"),
        (split(QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")), True, "llama-bpe"),
    ],
)
def test_the_way_text_is_split_gets_its_name(pre: Any, ignore_merges: bool, name: str, tmp_path: Path) -> None:
    directory = tokenizer_json(tmp_path, pre_tokenizer=pre, model={"ignore_merges": ignore_merges})
    found = vocabulary(directory, SPEC)
    assert (found["ggml.model"], found["ggml.pre"]) == ("gpt2", name)
    assert len(found["ggml.tokens"]) == len(found["ggml.token_type"]) == SPEC.vocab_size
    assert found["ggml.token_type"][-1] == UNUSED
    assert found["ggml.token_type"][1] == CONTROL
    assert (found["ggml.bos_token_id"], found["ggml.eos_token_id"], found["ggml.eot_token_id"]) == (1, 2, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": split(r"\p{L}+")},
        {"pre_tokenizer": split(QWEN2), "model": {"ignore_merges": True}},
        {"normalizer": {"type": "Lowercase"}},
        {"model": {"type": "Unigram"}},
    ],
)
def test_a_tokenizer_without_a_counterpart_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"tokenizer\.json"):
        vocabulary(tokenizer_json(tmp_path, **changes), SPEC)


def test_sentencepiece_s_tokens_are_scored_in_the_order_of_their_merges(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "<0x0A>": 3, "\u2581": 4, "a": 5, "b": 6, "ab": 7, "\u2581ab": 8}
    model = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"], ["\u2581", "ab"]], "byte_fallback": True}
    model["unk_token"] = "<unk>"
    added = [{"id": i, "content": t, "special": True} for i, t in enumerate(("<unk>", "<s>", "</s>"))]
    steps = [{"type": "Prepend", "prepend": "\u2581"}, {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]
    described = {"version": "1.0", "added_tokens": [], "model": model, "normalizer": {"type": "Sequence", "normalizers": steps}}
    for entry in added:
        entry |= {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**described, "added_tokens": added}))
    spec = manifest.ModelSpec("llama", 1, 8, 9, 1, 1, 8, 64, bos_token_id=1, eos_token_ids=(2,))
    found = vocabulary(tmp_path, spec)
    assert found["ggml.model"] == "llama"
    assert found["ggml.add_space_prefix"] is True
    assert found["ggml.token_type"][3:6] == [BYTE, NORMAL, NORMAL]
    score = dict(zip(found["ggml.tokens"], found["ggml.scores"], strict=True))
    assert score["ab"] > score["\u2581ab"] > score["a"]
