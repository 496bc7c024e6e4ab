"""Opening and describing the two sides."""

import numpy as np
import pytest

import optkit
from optkit.checkpoint.quant_linear import QuantEmbedding, QuantLinear
from optkit.validate import sides


def test_a_quantized_checkpoint_is_dequantized_once_and_gives_the_same_numbers(tiny_quantized):
    ids, lengths = np.array([[1, 40, 41, 42]]), np.array([4])
    with sides.opened(tiny_quantized) as once, optkit.open_session(tiny_quantized) as each_time:
        np.testing.assert_array_equal(once.prefill(ids, lengths), each_time.prefill(ids, lengths))
        assert packed_modules(each_time)
        assert not packed_modules(once)


def packed_modules(session) -> list[str]:
    return [name for name, module in session.model.named_modules() if isinstance(module, QuantLinear | QuantEmbedding)]


def test_quantized_activations_stay_as_they_are(tiny_checkpoint, tmp_path):
    recipe = {"scheme": "w8a8", "embedding": "keep", "lm_head": "keep", "tied": "keep"}
    path = optkit.quantize(tiny_checkpoint, recipe, tmp_path / "q")
    ids, lengths = np.array([[1, 40, 41, 42]]), np.array([4])
    with sides.opened(path) as once, optkit.open_session(path) as each_time:
        np.testing.assert_array_equal(once.prefill(ids, lengths), each_time.prefill(ids, lengths))
        assert packed_modules(once) == packed_modules(each_time) != []


def test_an_open_session_is_used_and_left_open(tiny_artifact):
    with optkit.open_session(tiny_artifact) as session:
        with sides.opened(session) as same:
            assert same is session
        session.prefill(np.array([[1, 2]]), np.array([2]))


def test_both_kinds_of_directory_are_described(tiny_artifact, tiny_quantized, tiny_checkpoint):
    with sides.opened(tiny_artifact) as session:
        facts = sides.describe(tiny_artifact, session)
    assert (facts["kind"], facts["backend"], facts["target"], facts["dtype"]) == ("artifact", "ort", "ort", "fp32")
    assert facts["quantized"] is False
    with sides.opened(tiny_quantized) as session:
        facts = sides.describe(tiny_quantized, session)
    assert facts["quantized"] is True
    assert facts["scheme"].startswith("w4a16 g32 sym")
    with sides.opened(tiny_checkpoint) as session:
        assert sides.describe(tiny_checkpoint, session)["backend"] == "torch"


def test_the_reference_in_float64_is_closer_than_float32_noise(tiny_checkpoint):
    ids, lengths = np.array([[1, 40, 41, 42]]), np.array([4])
    with sides.opened(tiny_checkpoint) as session, sides.in_float64(tiny_checkpoint, session) as precise:
        error = np.abs(precise.prefill(ids, lengths) - session.prefill(ids, lengths)).max()
    assert 0 < error < 1e-3


def test_there_is_no_float64_twin_of_another_engine(tiny_artifact):
    with sides.opened(tiny_artifact) as session, sides.in_float64(tiny_artifact, session) as precise:
        assert precise is None


@pytest.mark.parametrize("count", [1, 7])
def test_all_logits_of_a_row_are_those_of_each_prefix(tiny_artifact, count):
    ids = np.arange(30, 30 + count, dtype=np.int64)
    with sides.opened(tiny_artifact) as session:
        every = sides.all_logits(session, ids)
        last = session.prefill(ids[None], np.array([count]))[0]
    assert every.shape[0] == count
    np.testing.assert_allclose(every[-1], last, atol=1e-4)
