"""The exported graph: its inputs and sizes, that it generalises, and that a broken one is never published."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import optkit
from optkit import io_spec
from optkit.errors import UnsupportedError, UsageError, VerificationError
from optkit.export import graph as graph_module
from optkit.export.graph import untouched_reference
from optkit.export.verify import Runner, artifact_error, open_exact, verify_onnx
from optkit.io_spec import GraphSpec
from optkit.manifest import read_manifest
from tests import tiny

# float32 kernels that sum in another order, relative to the logit range; measured 1e-7 to 2e-6 over two to six layers.
EXPORT_ERROR = 1e-5


def spec_of(artifact) -> GraphSpec:
    return GraphSpec.from_dict(read_manifest(artifact).facts["graph"])


def runner(artifact, batch: int, capacity: int = 48) -> Runner:
    return Runner(open_exact(artifact / "model.onnx"), spec_of(artifact), batch, capacity)


def kinds(artifact, file: str = "model.onnx") -> Counter:
    return Counter(node.op_type for node in onnx.load(artifact / file, load_external_data=False).graph.node)


def model_logits(model, row: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor([row])).logits[0].float().numpy()


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / (want.max() - want.min()))


def random_row(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, tiny.VOCAB, length).tolist()


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 6), (3, 20)])
def test_graph_is_right_at_sizes_that_were_not_traced(artifact_of, batch, length):
    """pytorch#152018, optimum#2320: dynamic sizes were accepted and the graph worked only at the traced ones."""
    rows = [random_row(length, seed) for seed in range(batch)]
    logits = runner(artifact_of("llama"), batch).step(rows, list(range(length)))
    model = tiny.build("llama")
    for got, row in zip(logits, rows, strict=True):
        assert relative(got, model_logits(model, row)) < EXPORT_ERROR


@pytest.mark.parametrize(("name", "heads", "size"), [("qwen3", 2, 32), ("llama_mqa", 1, 16), ("llama_mha", 4, 16)])
def test_cache_sizes_come_from_kv_heads_and_head_dim(artifact_of, name, heads, size):
    """optimum#2379, optimum#1399: sizes were computed from hidden size over heads."""
    artifact = artifact_of(name)
    for cache in spec_of(artifact).caches:
        assert cache.shape == (None, heads, None, size)
    session = onnxruntime.InferenceSession(str(artifact / "model.onnx"), providers=["CPUExecutionProvider"])
    past = next(value for value in session.get_inputs() if value.name == "past_key_values.0.key")
    assert past.shape == ["batch_size", heads, "past_sequence_length", size]


def test_attention_mask_is_an_input_and_wanted_positions_are_optional(artifact_of):
    """transformers 5.24 drops ``attention_mask`` from the graph when the sample has no padding."""
    session = onnxruntime.InferenceSession(str(artifact_of("llama") / "model.onnx"), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    assert names[:2] == [io_spec.INPUT_IDS, io_spec.ATTENTION_MASK]
    assert io_spec.LOGITS_POSITIONS not in names
    assert [v.name for v in session.get_overridable_initializers()] == [io_spec.LOGITS_POSITIONS]
    assert session.get_outputs()[0].name == io_spec.LOGITS


def test_rows_of_different_lengths_do_not_touch_each_other(artifact_of):
    """mobius#260, transformers 5.24's ORT fusions: wrong rows in a batch of unequal lengths. Padding holds real ids here."""
    artifact, model = artifact_of("llama_mqa"), tiny.build("llama_mqa")
    rows = [random_row(13, 1), random_row(4, 2), random_row(9, 3)]
    batch = runner(artifact, 3)
    logits = batch.step(rows, [-1])
    forced = [random_row(5, 10 + index) for index in range(3)]
    for index, row in enumerate(rows):
        assert relative(logits[index, 0], model_logits(model, row)[-1]) < EXPORT_ERROR
    for step in range(5):
        logits = batch.step([[tokens[step]] for tokens in forced])
        for index, row in enumerate(rows):
            want = model_logits(model, row + forced[index][: step + 1])[-1]
            assert relative(logits[index, 0], want) < EXPORT_ERROR


@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_sliding_window_includes_the_current_token(artifact_of, target):
    """onnxruntime#25927, mobius#371: a window off by one, or none. Of 7, 8 and 9 only the model's own 8 may match."""
    artifact = artifact_of("mistral", target=target)
    if target == "ort":
        windows = {
            attribute.i
            for node in onnx.load(artifact / "model.onnx", load_external_data=False).graph.node
            for attribute in node.attribute
            if attribute.name == "local_window_size"
        }
        assert windows == {tiny.WINDOW}
    row = random_row(30, 4)
    run = runner(artifact, 1)
    got = [run.step([row[:20]])[0, 0], *(run.step([[token]])[0, 0] for token in row[20:])]
    model = tiny.build("mistral")
    errors = {}
    for window in (7, 8, 9):
        model.config.sliding_window = window
        want = model_logits(model, row)[19:]
        errors[window] = max(relative(g, w) for g, w in zip(got, want, strict=True))
    assert errors[8] < EXPORT_ERROR
    assert min(errors[7], errors[9]) > 1e-3


@pytest.mark.parametrize("attribute", ["softcap", "local_window_size", "do_rotary", "scale"])
def test_a_graph_with_a_dropped_feature_is_refused(artifact_of, checkpoint_of, tmp_path, attribute):
    """gemma-2b ONNX logits were off by 1923 and the export only warned (optimum#1755); caps were dropped (genai#692)."""
    name = "gemma2"
    artifact = artifact_of(name)
    broken = tmp_path / "broken"
    shutil.copytree(artifact, broken)
    model = onnx.load(broken / "model.onnx", load_external_data=False)
    changed = 0
    for node in model.graph.node:
        for found in node.attribute:
            if (
                node.op_type == "GroupQueryAttention"
                and found.name == attribute
                and onnx.helper.get_attribute_value(found) not in (-1, 0)
            ):
                found.CopyFrom(
                    onnx.helper.make_attribute(attribute, {"local_window_size": -1, "do_rotary": 0}.get(attribute, 0.01))
                )
                changed += 1
    assert changed
    onnx.save(model, broken / "model.onnx")
    reference = untouched_reference(optkit.checkpoint.model.open_checkpoint(checkpoint_of(name)), torch.float32)
    verify_onnx(artifact / "model.onnx", spec_of(artifact), reference, torch.float32)
    with pytest.raises(VerificationError, match="differ from the model's"):
        verify_onnx(broken / "model.onnx", spec_of(artifact), reference, torch.float32)


def test_damaged_weights_are_refused(artifact_of, checkpoint_of, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(artifact_of("llama"), broken)
    data = bytearray((broken / "model.onnx.data").read_bytes())
    middle = len(data) // 2
    data[middle : middle + 8192] = bytes(8192)
    (broken / "model.onnx.data").write_bytes(data)
    reference = untouched_reference(optkit.checkpoint.model.open_checkpoint(checkpoint_of("llama")), torch.float32)
    errors = artifact_error(open_exact(broken / "model.onnx"), spec_of(broken), reference)
    assert max(errors.values()) > 1e-3


def test_soft_caps_are_in_the_logits_not_only_in_the_order(artifact_of):
    """Greedy decoding hides a dropped cap: tanh is monotonic. The tiny gemma2's logits exceed its cap before capping."""
    row = random_row(12, 5)
    got = runner(artifact_of("gemma2"), 1).step([row])[0, 0]
    model = tiny.build("gemma2")
    assert relative(got, model_logits(model, row)[-1]) < EXPORT_ERROR
    model.config.final_logit_softcapping = None
    assert relative(got, model_logits(model, row)[-1]) > 1e-2


@pytest.mark.parametrize("batch", [1, 3])
def test_experts_that_no_probe_reached_are_there_and_right(artifact_of, batch):
    """Mixtral's expert loop broke exports (optimum#1671), and tracing dropped experts the sample did not hit
    (YOLO-Master#74)."""
    artifact, model = artifact_of("mixtral"), tiny.build("mixtral")
    assert kinds(artifact)["MoE"] == 2
    rows = [random_row(24, 20 + seed) for seed in range(batch)]
    logits = runner(artifact, batch).step(rows, list(range(24)))
    for got, row in zip(logits, rows, strict=True):
        assert relative(got, model_logits(model, row)) < EXPORT_ERROR
    shapes = [tuple(i.dims) for i in onnx.load(artifact / "model.onnx", load_external_data=False).graph.initializer]
    assert sum(shape[:1] == (4,) and len(shape) == 3 for shape in shapes) == 4  # two matrices of four experts in two layers


def test_tied_embedding_is_written_once(artifact_of):
    """optimum#1326, #2241: a transposed second copy. llama_tied: vocabulary 128 x hidden 64."""
    facts = read_manifest(artifact_of("llama_tied")).facts
    assert facts["audit"]["features"]["tied_embeddings"]["evidence"] == {"shared_tensors": 1}
    assert facts["audit"]["bytes"]["graph"] < facts["audit"]["bytes"]["checkpoint"] + 2 * 256 * 16 * 4


def test_quantized_tied_embedding_is_one_tensor_for_both(artifact_of):
    artifact = artifact_of("llama_tied", "w4a16")
    model = onnx.load(artifact / "model.onnx", load_external_data=False)
    table = next(node for node in model.graph.node if node.op_type == "GatherBlockQuantized")
    heads = [node for node in model.graph.node if node.op_type == "MatMulNBits" and node.input[1] == table.input[0]]
    assert len(heads) == 1


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a16"])
@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_quantized_checkpoint_and_artifact_hold_the_same_numbers(artifact_of, scheme, symmetric, target):
    artifact = artifact_of("llama_tied", scheme, (("symmetric", symmetric), ("group_size", 32)), target=target)
    verified = read_manifest(artifact).facts["verified"]["logit_error"]
    assert max(verified.values()) < EXPORT_ERROR
    found = kinds(artifact)
    if target == "ort":  # q, k, v packed; o; gate, up packed; down; times two layers; head
        assert found["MatMulNBits"] == 9
        assert found["MatMul"] == 0
    else:
        assert found["DequantizeLinear"] == 9
        domains = {node.domain for node in onnx.load(artifact / "model.onnx", load_external_data=False).graph.node}
        assert domains <= {"", "ai.onnx"}


def test_graph_for_onnxruntime_has_only_fused_nodes_per_layer(artifact_of):
    found = kinds(artifact_of("llama"))
    assert found["GroupQueryAttention"] == 2
    assert found["SkipSimplifiedLayerNormalization"] + found["SimplifiedLayerNormalization"] == 5
    assert found["Transpose"] == 0
    assert found["RotaryEmbedding"] == 0


def test_portable_graph_passes_the_checker_and_runs_in_the_reference_evaluator(artifact_of):
    artifact = artifact_of("llama", target="onnx")
    onnx.checker.check_model(str(artifact / "model.onnx"), full_check=True)
    spec = spec_of(artifact)
    evaluator = onnx.reference.ReferenceEvaluator(str(artifact / "model.onnx"))
    row = random_row(5, 6)
    feeds = {
        io_spec.INPUT_IDS: np.array([row], np.int64),
        io_spec.ATTENTION_MASK: np.ones((1, 5), np.int64),
        io_spec.LOGITS_POSITIONS: np.array([-1], np.int64),
        **{c.past: np.zeros(c.sizes(1, 8), np.float32) for c in spec.caches},
    }
    logits = evaluator.run([io_spec.LOGITS], feeds)[0]
    assert relative(logits[0, 0], model_logits(tiny.build("llama"), row)[-1]) < EXPORT_ERROR


def test_rows_of_a_chunked_run_prefill_decode_and_idle_together(artifact_of):
    """One run: row 0 continues, row 1 starts, row 2 brings nothing. Each equals its own run."""
    artifact, model = artifact_of("llama", chunks=True), tiny.build("llama")
    facts = read_manifest(artifact).facts
    spec = GraphSpec.from_dict(facts["chunks_graph"])
    run = Runner(open_exact(artifact / facts["chunks_file"]), spec, 3, 32)
    first, second, third = random_row(9, 7), random_row(6, 8), random_row(4, 9)
    run.step([first[:5], [], third])
    logits = run.step([first[5:], second, []])
    assert relative(logits[0, 0], model_logits(model, first)[-1]) < EXPORT_ERROR
    assert relative(logits[1, 0], model_logits(model, second)[-1]) < EXPORT_ERROR
    logits = run.step([[], [11], [12]])
    assert relative(logits[1, 0], model_logits(model, [*second, 11])[-1]) < EXPORT_ERROR
    assert relative(logits[2, 0], model_logits(model, [*third, 12])[-1]) < EXPORT_ERROR
    assert not (artifact / "model_chunks.onnx.data").exists()


def test_half_precision_has_no_float32_weights_and_answers_alike(artifact_of):
    """transformers#47050: masks in float32 inside a float16 export."""
    artifact = artifact_of("llama", dtype="fp16")
    facts = read_manifest(artifact).facts
    assert facts["audit"]["islands"]["tensors"] == []
    assert {c.dtype for c in spec_of(artifact).caches} == {"float16"}
    assert facts["activation_range"]["peak"] < 1000
    logits = runner(artifact, 2).step([random_row(9, 1), random_row(3, 2)])
    assert np.isfinite(logits).all()


def test_half_precision_is_refused_where_activations_overflow(checkpoint_of, tmp_path):
    """onnxruntime-genai#2444: activations reach 45k, the build succeeds and the model emits one token for ever."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint_of("llama"), dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1e5)
    hot = tmp_path / "hot"
    shutil.copytree(checkpoint_of("llama"), hot)
    model.save_pretrained(hot)
    with pytest.raises(UnsupportedError, match=r"activations reach .* in model\.embed_tokens|activations reach .* in model"):
        optkit.export(hot, None, tmp_path / "out", dtype="fp16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"opset": 17}, UnsupportedError, "opset 17: target ort is written in opset 21"),
        ({"target": "onnx", "opset": 22}, UnsupportedError, "opset 22"),
        ({"dtype": "bf16"}, UnsupportedError, "bf16"),
        ({"target": "onnx", "chunks": True}, UnsupportedError, "chunks"),
        ({"max_seq_len": 100000}, UsageError, "the model has 256 positions"),
        ({"target": "onx"}, optkit.errors.RecipeError, "did you mean 'onnx'"),
    ],
)
def test_what_a_target_cannot_do_is_refused_before_anything_is_written(checkpoint_of, tmp_path, options, error, match):
    with pytest.raises(error, match=match):
        optkit.export(checkpoint_of("llama"), None, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("opset", [21, 24])
def test_opset_is_the_one_asked_for(artifact_of, opset):
    model = onnx.load(artifact_of("llama", opset=opset) / "model.onnx", load_external_data=False)
    assert {e.domain: e.version for e in model.opset_import}[""] == opset


def test_max_seq_len_sizes_the_rotary_tables(artifact_of):
    artifact = artifact_of("llama", max_seq_len=40)
    assert spec_of(artifact).max_seq_len == 40
    tables = [tuple(i.dims) for i in onnx.load(artifact / "model.onnx", load_external_data=False).graph.initializer]
    assert (40, 8) in tables


def test_every_tensor_is_accounted_for(artifact_of):
    """MNN#4683: q_norm and k_norm were missing from the mapping."""
    tensors = read_manifest(artifact_of("qwen3")).facts["audit"]["tensors"]
    assert tensors["not_read_by_forward"] == []
    assert tensors["not_of_the_model"] == []
    assert tensors["in_graph"] == len(tiny.build("qwen3").state_dict())


def test_artifact_config_still_describes_the_model(artifact_of):
    """Fast-LLM#102: the exported config lost head_dim."""
    config = json.loads((artifact_of("qwen3") / "config.json").read_text())
    assert config["head_dim"] == 32
    assert config["num_key_value_heads"] == 2


def test_audit_names_a_feature_that_left_no_trace(artifact_of, checkpoint_of, monkeypatch):
    from optkit.export import audit

    original = audit.features

    def without(*arguments):
        found = original(*arguments)
        found["attention_softcap"]["evidence"] = None
        return found

    monkeypatch.setattr(audit, "features", without)
    with pytest.raises(VerificationError, match="attention_softcap"):
        optkit.export(checkpoint_of("gemma2"), None, artifact_of("llama").parent / "never")
    assert not (artifact_of("llama").parent / "never").exists()


def test_settings_table_names_every_target_that_is_a_graph():
    assert {*graph_module.TARGETS, "gguf"} == set(optkit.recipe.TARGETS)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16"])
def test_a_scaled_embedding_keeps_its_factor_when_quantized(artifact_of, scheme):
    """gemma multiplies the embedding by sqrt(hidden); its tied head does not."""
    assert (
        max(read_manifest(artifact_of("gemma2", scheme, (("group_size", 32),))).facts["verified"]["logit_error"].values())
        < EXPORT_ERROR
    )


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16"])
def test_tensorrt_gets_what_its_lint_accepts(artifact_of, scheme):
    """INT8 scales must be positive there, and the embedding is not quantized."""
    artifact = artifact_of("llama_tied", scheme, (("group_size", 32),), target="tensorrt", dtype="fp16", max_seq_len=64)
    found = kinds(artifact)
    assert found["DequantizeLinear"] == 9
    assert found["TensorScatter"] == 4
    assert found["Attention"] == 2


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [48, 36])
def test_a_scale_per_channel_becomes_blocks_the_kernels_take(checkpoint_of, tmp_path, symmetric, size):
    """MatMulNBits takes blocks of a power of two: 48 inputs are three blocks of 16, 36 are padded to two of 32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", hidden_size=size, intermediate_size=size, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=96, max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=size == 48,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    embedding = "same" if size == 48 else "keep"
    section = {"scheme": "w8a16", "group_size": "channel", "symmetric": symmetric, "embedding": embedding}
    if size == 36:
        section["tied"] = "untie"
    quantized = optkit.quantize(tmp_path / "model", section, tmp_path / "quantized")
    artifact = optkit.export(quantized, None, tmp_path / "artifact")
    blocks = {
        attribute.i
        for node in onnx.load(artifact / "model.onnx", load_external_data=False).graph.node
        for attribute in node.attribute
        if attribute.name == "block_size"
    }
    assert blocks == ({16, 32} if size == 48 else {32})  # o_proj has 32 inputs
    assert max(read_manifest(artifact).facts["verified"]["logit_error"].values()) < EXPORT_ERROR
