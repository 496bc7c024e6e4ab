"""Another exporter's model: a growing cache, left padding, no manifest. The graph is written by hand, its answers in numpy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from optkit.errors import ArtifactError, UnsupportedError
from optkit.runtime.session import Session, open_session

V, H, D, POSITIONS = 40, 2, 4, 64
W = H * D
RELATIVE = 1e-6  # one attention layer in float32
rng = np.random.default_rng(0)
EMBEDDING, PLACE, HEAD = (rng.standard_normal(shape).astype(np.float32) for shape in ((V, W), (POSITIONS, W), (W, V)))
CONFIG = {"model_type": "hand", "vocab_size": V, "num_hidden_layers": 1, "hidden_size": W, "num_attention_heads": H,
          "max_position_embeddings": POSITIONS, "eos_token_id": 2}  # fmt: skip


def answer(ids: np.ndarray) -> np.ndarray:
    """Logits ``[S, V]``: learned positions, one causal self-attention without projections, a linear head."""
    x = (EMBEDDING[ids] + PLACE[: len(ids)]).astype(np.float64)
    heads = x.reshape(len(ids), H, D).transpose(1, 0, 2)
    scores = heads @ heads.transpose(0, 2, 1) / np.sqrt(D)
    scores[:, np.triu(np.ones((len(ids), len(ids)), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (weights / weights.sum(-1, keepdims=True)) @ heads
    return mixed.transpose(1, 0, 2).reshape(len(ids), W) @ HEAD


def write_model(directory: Path, extra_input: str | None = None) -> Path:
    node, ints = helper.make_node, (lambda name, *values: numpy_helper.from_array(np.array(values, np.int64), name))
    nodes = [
        node("Gather", ["embedding", "input_ids"], ["tokens"]),
        node("Gather", ["place", "position_ids"], ["places"]),
        node("Add", ["tokens", "places"], ["x"]),
        node("Shape", ["input_ids"], ["s"], start=1, end=2),
        node("Shape", ["attention_mask"], ["t"], start=1, end=2),
        node("Sub", ["t", "s"], ["past"]),
        node("Squeeze", ["past"], ["past_"]),
        node("Squeeze", ["t"], ["t_"]),
        node("Range", ["past_", "t_", "one"], ["rows"]),
        node("Range", ["zero", "t_", "one"], ["columns"]),
        node("Unsqueeze", ["rows", "last"], ["rows_"]),
        node("LessOrEqual", ["columns", "rows_"], ["causal"]),
        node("Cast", ["attention_mask"], ["real"], to=TensorProto.BOOL),
        node("Unsqueeze", ["real", "middle"], ["real_"]),
        node("And", ["causal", "real_"], ["mask"]),
        node(
            "Attention",
            ["x", "x", "x", "mask", "past_key_values.0.key", "past_key_values.0.value"],
            ["mixed", "present.0.key", "present.0.value"],
            q_num_heads=H,
            kv_num_heads=H,
        ),
        node("MatMul", ["mixed", "head"], ["logits"]),
    ]
    info, kv = helper.make_tensor_value_info, ["batch", H, "past", D]
    inputs = [info(name, TensorProto.INT64, ["batch", size]) for name, size in
              (("input_ids", "s"), ("attention_mask", "t"), ("position_ids", "s"))]  # fmt: skip
    inputs += [info(f"past_key_values.0.{role}", TensorProto.FLOAT, kv) for role in ("key", "value")]
    if extra_input:
        inputs.append(info(extra_input, TensorProto.FLOAT, [1]))
    outputs = [info("logits", TensorProto.FLOAT, ["batch", "s", V])]
    outputs += [info(f"present.0.{role}", TensorProto.FLOAT, ["batch", H, "total", D]) for role in ("key", "value")]
    constants = [
        numpy_helper.from_array(array, name) for name, array in (("embedding", EMBEDDING), ("place", PLACE), ("head", HEAD))
    ]
    constants += [ints("last", 1), ints("middle", 1, 2)]
    constants += [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in (("one", 1), ("zero", 0))]
    graph = helper.make_graph(nodes, "hand", inputs, outputs, constants)
    directory.mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.save(model, directory / "model.onnx")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with open_session(write_model(tmp_path / "foreign"), threads=1) as opened:
        yield opened


def assert_close(ours: np.ndarray, want: np.ndarray) -> None:
    assert np.abs(ours - want).max() <= RELATIVE * np.ptp(want)


def test_the_model_s_facts_come_from_its_config_and_graph(session: Session) -> None:
    assert (session.backend, session.max_seq_len, session.spec.eos_token_ids) == ("ort", POSITIONS, (2,))
    assert session.cache_bytes(2, 10) == 2 * 2 * H * 10 * D * 4


def test_prompt_and_steps_of_ragged_rows_are_those_of_each_row_alone(session: Session) -> None:
    ids, lengths, forced = rng.integers(3, V, (3, 9)), [9, 2, 6], rng.integers(3, V, (3, 5))
    every = session.prefill(ids, lengths, logits="all")
    last = session.prefill(ids, lengths)
    for row, length in enumerate(lengths):
        assert_close(every[row, :length], answer(ids[row, :length]))
        assert_close(last[row], answer(ids[row, :length])[-1])
    for step in range(5):
        logits = session.decode(forced[:, step])
        for row, length in enumerate(lengths):
            assert_close(logits[row], answer(np.concatenate([ids[row, :length], forced[row, : step + 1]]))[-1])


def test_rows_can_be_selected_truncated_and_continued(session: Session) -> None:
    ids = rng.integers(3, V, (2, 8))
    session.prefill(ids)
    session.select([1, 1])
    session.truncate([5, 5])
    logits = session.decode([[7, 8], [9, 10]])
    assert_close(logits[0], answer(np.array([*ids[1, :5], 7, 8]))[-2:])
    assert_close(logits[1], answer(np.array([*ids[1, :5], 9, 10]))[-2:])
    with pytest.raises(UnsupportedError, match="truncated together"):
        session.truncate([3, 4])
    with pytest.raises(UnsupportedError, match="same number of tokens"):
        session.extend([[5, 6], [7, 8]], [1, 2])


def test_generation_is_greedy_over_the_hand_computed_logits(session: Session) -> None:
    tokens = [5, 6, 7]
    for _ in range(10):
        tokens.append(int(answer(np.array(tokens))[-1].argmax()))
    assert session.generate([5, 6, 7], max_new_tokens=10, ignore_eos=True).tokens == [tokens[3:]]


def test_a_graph_with_unknown_inputs_is_refused_by_their_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="'encoder_hidden_states'"):
        open_session(write_model(tmp_path / "x", extra_input="encoder_hidden_states"))
    bare = write_model(tmp_path / "bare")
    (bare / "config.json").unlink()
    with pytest.raises(ArtifactError, match=r"neither optkit\.json nor config\.json"):
        open_session(bare)
    (bare / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": None}))
    with pytest.raises(ArtifactError, match="no vocab_size"):
        open_session(bare)
    (bare / "model.onnx").write_bytes(b"not a model")
    (bare / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ArtifactError, match="cannot load it"):
        open_session(bare)
