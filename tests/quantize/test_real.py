"""The demo model, quantized and read by transformers: the numbers a tiny model cannot give."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import optkit
from optkit import manifest
from optkit.checkpoint.model import open_checkpoint, quiet
from tests import budgets

MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not MODEL.is_file(), reason="make model fetches it")]


@pytest.fixture(scope="module")
def source():
    return open_checkpoint(MODEL)


@pytest.fixture(
    scope="module",
    params=[{"group_size": 32}, {"group_size": 32, "symmetric": False}, {"scheme": "w8a16", "group_size": 64}],
    ids=str,
)
def checkpoint(request, source, tmp_path_factory):
    return open_checkpoint(optkit.quantize(source, out_dir=tmp_path_factory.mktemp("real") / "out", **request.param))


def test_the_real_model_has_the_same_logits_in_transformers(checkpoint):
    ids = torch.randint(3, 40_000, (2, 24), generator=torch.Generator().manual_seed(0))
    with quiet(), torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(checkpoint.directory, dtype=torch.float32, attn_implementation="eager")
        expected = theirs.eval()(ids).logits
        assert torch.equal(checkpoint.load()(ids).logits, expected)


def test_the_weight_error_of_every_layer_is_what_its_bits_give(checkpoint):
    facts = manifest.read_manifest(checkpoint.directory).facts
    limit = budgets.SQNR_DB[facts["schemes"]["model.layers.0.mlp.up_proj"]]
    assert len(facts["layers"]) == 211
    assert min(layer["sqnr_db"] for layer in facts["layers"].values()) > limit


def test_the_directory_has_the_size_that_its_bits_promise(checkpoint):
    size = sum(path.stat().st_size for path in checkpoint.directory.rglob("*") if path.is_file())
    scheme = checkpoint.quantization["lm_head"]
    bits = (
        scheme.num_bits
        + 16 / scheme.group_size
        + (0 if scheme.symmetric else 16 / scheme.group_size + scheme.num_bits / scheme.group_size)
    )
    table = 49_152 * 576
    dense = table * (2 if scheme.num_bits == 4 and scheme.symmetric else 4)
    assert size < 1.01 * ((106_168_320 + table) * bits / 8 + dense) + 4_000_000  # tokenizer, norms, headers
