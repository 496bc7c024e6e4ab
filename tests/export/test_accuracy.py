"""The products that compute in float32 although the others round their activations."""

import collections

import onnx
import pytest

import optkit


def levels(directory):
    """Accuracy level -> how many products have it, and the level of the product with the most outputs."""
    graph = onnx.load(str(directory / "model.onnx"), load_external_data=False).graph
    found = []
    for node in graph.node:
        if node.op_type == "MatMulNBits":
            numbers = {a.name: a.i for a in node.attribute}
            found.append((numbers["accuracy_level"], numbers["N"]))
    return collections.Counter(level for level, _ in found), max(found, key=lambda pair: pair[1])[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Two layers with tied weights, quantized; the vocabulary is the widest output."""
    from tests import tiny

    folder = tmp_path_factory.mktemp("accuracy")
    return optkit.quantize(tiny.save("llama", folder / "model", intermediate_size=32), {"group_size": 32}, folder / "q")


def test_the_head_and_what_feeds_attention_are_exact_by_default(checkpoint, tmp_path):
    found, head = levels(optkit.export(checkpoint, {}, tmp_path / "a"))
    assert head == 1
    assert found == {1: 2 + 1, 4: 2 * 3}  # packed q/k/v of two layers and the head; o, gate and up packed, down


def test_qk_norms_and_biases_do_not_hide_the_products(tmp_path):
    from tests import tiny

    quantized = optkit.quantize(tiny.save("qwen3", tmp_path / "model"), {"group_size": 32}, tmp_path / "q")
    found, head = levels(optkit.export(quantized, {}, tmp_path / "a"))
    assert head == 1
    assert found[1] > found[4] / 3


@pytest.mark.parametrize("level", [1, 4])
def test_one_level_for_all_can_be_asked_for(checkpoint, tmp_path, level):
    recipe = {"accuracy_level": level, "sensitive_accuracy_level": level}
    found, _ = levels(optkit.export(checkpoint, recipe, tmp_path / "a"))
    assert set(found) == {level}
