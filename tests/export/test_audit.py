"""The audit looks at the graph: every feature that is taken out of a graph, or damaged in it, is missed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest

from optkit.export import audit, features
from optkit.export.features import ATTENTION
from optkit.io_spec import GraphSpec
from optkit.manifest import read_manifest
from tests import tiny


@pytest.fixture
def graph_of(artifact_of):
    """``graph_of(name)``: the exported graph of a tiny model, its own copy each time."""

    def load(name: str, **options: object) -> ir.Model:
        model = ir.load(artifact_of(name, **options) / "model.onnx")
        ir.external_data.load_to_model(model)
        return model

    return load


def attention(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph.all_nodes() if node.op_type in ATTENTION]


def replace(model: ir.Model, value: ir.Value, array: np.ndarray) -> None:
    value.const_value = ir.tensor(array, name=value.name)


def test_caches_of_another_head_size_or_count_are_found(artifact_of, graph_of):
    model, config = graph_of("llama"), tiny.config("llama")
    spec = GraphSpec.from_dict(read_manifest(artifact_of("llama")).facts["graph"])
    assert features.kv_sizes(model, spec, config)["evidence"] is not None
    key = next(value for value in model.graph.inputs if value.name == spec.caches[0].past)
    for axis in (1, 3):
        sizes = list(key.shape)
        key.shape = ir.Shape([*sizes[:axis], sizes[axis] * 2, *sizes[axis + 1 :]])
        assert features.kv_sizes(model, spec, config)["evidence"] is None
        key.shape = ir.Shape(sizes)


def test_another_attention_scale_is_found(graph_of):
    nodes = attention(graph_of("granite"))
    scale = tiny.config("granite").attention_multiplier
    assert features.scales(nodes, [{"scale": scale}])["evidence"] == [round(scale, 6)]
    nodes[0].attributes["scale"] = ir.AttrFloat32("scale", 2 * scale)
    assert features.scales(nodes, [{"scale": scale}])["evidence"] is None


def test_a_lost_attention_softcap_is_found(graph_of):
    model, config = graph_of("gemma2"), tiny.config("gemma2")
    nodes = attention(model)
    calls = [{"softcap": config.attn_logit_softcapping}] * len(nodes)
    assert features.softcap(model, nodes, config, calls)["evidence"] is not None
    nodes[0].attributes.pop("softcap")
    assert features.softcap(model, nodes, config, calls)["evidence"] is None


@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_a_lost_window_and_one_that_is_off_by_one_are_found(graph_of, name):
    model, config = graph_of(name), tiny.config(name)
    nodes = attention(model)
    windowed = [node for node in nodes if node.attributes.get("local_window_size")]
    assert windowed
    assert features.window(model, nodes, config)["evidence"] is not None
    right = windowed[0].attributes["local_window_size"].as_int()
    for node in windowed:
        node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", right + 1)
    assert features.window(model, nodes, config)["evidence"] is None
    for node in windowed:
        node.attributes.pop("local_window_size")
    assert features.window(model, nodes, config)["evidence"] is None


def test_lost_sinks_are_found(graph_of):
    model = graph_of("gpt_oss")
    nodes = attention(model)
    calls = [{"sinks": True}] * len(nodes)
    assert features.sinks(model, nodes, calls)["evidence"] == len(nodes)
    with_sinks = next(node for node in nodes if len(node.inputs) > 11 and node.inputs[11] is not None)
    with_sinks.replace_input_with(11, None)
    assert features.sinks(model, nodes, calls)["evidence"] is None


def test_a_lost_norm_of_query_or_key_is_found(graph_of):
    model = graph_of("qwen3")
    nodes = attention(model)
    calls = [{"qk_norms": 2}] * len(nodes)
    assert features.qk_norms(nodes, calls)["evidence"] == len(nodes)
    norm = next(node for node in features.before_product(nodes[0].inputs[0]) if node.op_type in features.NORMS)
    norm.outputs[0].replace_all_uses_with(norm.inputs[0])
    assert features.qk_norms(nodes, calls)["evidence"] is None


@pytest.mark.parametrize("name", ["llama3_rope", "llama_linear", "llama_yarn"])
def test_rotary_tables_without_their_scaling_are_found(artifact_of, graph_of, name):
    model, config = graph_of(name), tiny.config(name)
    spec = GraphSpec.from_dict(read_manifest(artifact_of(name)).facts["graph"])
    assert features.rotary(model, spec, config)["evidence"]["scaled_tables"] > 0
    theta = config.rope_parameters["rope_theta"]
    for table in {id(t): t for t, _ in features.rotary_tables(model)}.values():
        use = next(iter(table.uses()))
        sine = use.node.inputs[use.idx + 1]
        rows, columns = table.shape
        angles = np.outer(np.arange(rows), theta ** (-np.arange(columns) / columns)).astype(np.float32)
        replace(model, table, np.cos(angles))
        replace(model, sine, np.sin(angles))
    assert features.rotary(model, spec, config)["evidence"] is None


def test_partial_rotary_over_whole_heads_is_found(artifact_of, graph_of):
    model, config = graph_of("phi"), tiny.config("phi")
    spec = GraphSpec.from_dict(read_manifest(artifact_of("phi")).facts["graph"])
    assert features.rotary(model, spec, config)["evidence"] is not None
    for table in {id(t): t for t, _ in features.rotary_tables(model)}.values():
        replace(model, table, np.tile(table.const_value.numpy(), (1, 8)))
        table.shape = ir.Shape(table.const_value.shape)
    assert features.rotary(model, spec, config)["evidence"] is None


def test_a_lost_expert_matrix_is_found(graph_of):
    model, config, source = graph_of("mixtral"), tiny.config("mixtral"), tiny.build("mixtral")
    assert features.experts(model, config, source)["evidence"] is not None
    stacked = next(v for v in model.graph.initializers.values() if len(v.const_value.shape) == 3)
    replace(model, stacked, stacked.const_value.numpy()[:-1])
    assert features.experts(model, config, source)["evidence"] is None


def test_a_second_copy_of_a_tied_embedding_is_found(graph_of):
    model, source = graph_of("llama_tied"), tiny.build("llama_tied")
    assert features.tied(model, source)["evidence"] == {"shared_tensors": 1}
    table = next(v for v in model.graph.initializers.values() if features._looked_up_and_multiplied(v))
    copy = ir.Value(name="copy", const_value=table.const_value, shape=table.shape, type=table.type)
    model.graph.initializers["copy"] = copy
    use = next(use for use in table.uses() if use.node.op_type != "Gather")
    use.node.replace_input_with(use.idx, copy)
    assert features.tied(model, source)["evidence"] is None


@pytest.mark.parametrize(
    ("name", "feature"), [("cohere", "logit_scale"), ("granite", "logits_scaling"), ("gemma2", "final_softcap")]
)
def test_a_lost_factor_or_cap_of_the_logits_is_found(graph_of, name, feature):
    model, config = graph_of(name), tiny.config(name)
    assert features.logit_features(model, config)[feature]["evidence"] is not None
    logits = next(value for value in model.graph.outputs if value.name == "logits")
    for node in list(features.before_product(logits)):
        for value in node.inputs:
            if features.scalar(value) is not None:
                replace(model, value, 3 * value.const_value.numpy())
    assert features.logit_features(model, config)[feature]["evidence"] is None


# ---------------------------------------------------------------------------------------------------- types and bytes


def graph_with(*arrays: np.ndarray) -> ir.Model:
    """A graph that holds these constants and adds up the first elements of the floating-point ones."""
    x = ir.val("x", ir.DataType.FLOAT, ir.Shape([1]))
    values = [ir.val(f"t{i}", const_value=ir.tensor(array, name=f"t{i}")) for i, array in enumerate(arrays)]
    nodes = [ir.node("Identity", [value]) for value in (x, *values)]
    graph = ir.Graph([x], [nodes[0].outputs[0]], nodes=nodes, initializers=values, opset_imports={"": 24})
    return ir.Model(graph, ir_version=12)


def sizes(tmp_path, expected: int, *arrays: np.ndarray) -> dict:
    checkpoint, weights = SimpleNamespace(directory=tmp_path), SimpleNamespace(nbytes=lambda: expected)
    return audit.sizes(graph_with(*arrays), checkpoint, weights)


def test_tensors_beyond_the_checkpoint_are_found(tmp_path):
    weights = np.ones((256, 256), np.float32)
    assert sizes(tmp_path, weights.nbytes, weights)["within_limit"]
    assert not sizes(tmp_path, weights.nbytes, weights, weights[:32].copy())["within_limit"]


def test_square_boolean_masks_are_counted_apart_and_nothing_else_of_that_type(tmp_path):
    weights, mask = np.ones((256, 256), np.float32), np.tri(512, dtype=bool)[None, None]
    found = sizes(tmp_path, weights.nbytes, weights, mask)
    assert found["within_limit"]
    assert found["mask_tables"] == mask.nbytes
    assert not sizes(tmp_path, weights.nbytes, weights, np.ones((512, 256), bool))["within_limit"]
    assert not sizes(tmp_path, weights.nbytes, weights, np.ones((512, 512), bool))["within_limit"]


def test_the_same_mask_twice_is_a_copy_too_many(tmp_path):
    weights, mask = np.ones((256, 256), np.float32), np.tri(512, dtype=bool)[None, None]
    assert not sizes(tmp_path, weights.nbytes, weights, mask, mask.copy())["within_limit"]


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16"])
@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_a_quantized_artifact_is_as_small_as_its_checkpoint(artifact_of, scheme, target):
    facts = read_manifest(artifact_of("llama", scheme, target=target)).facts
    assert facts["audit"]["bytes"]["within_limit"], facts["audit"]["bytes"]


def test_weights_and_products_of_another_type_are_islands(graph_of):
    model = graph_of("llama", dtype="fp16")
    assert audit.islands(model, "float16")["tensors"] == []
    weight = next(
        v for v in model.graph.initializers.values() if v.dtype == ir.DataType.FLOAT16 and v.const_value.nbytes > 4096
    )
    weight.dtype = ir.DataType.FLOAT
    replace(model, weight, weight.const_value.numpy().astype(np.float32))
    assert audit.islands(model, "float16")["tensors"] == [weight.name]
    product = next(node for node in model.graph if node.op_type == "MatMul")
    product.outputs[0].dtype = ir.DataType.FLOAT
    assert audit.islands(model, "float16")["products"] == {"MatMul": 1}
