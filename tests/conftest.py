"""What every test gets: offline, a cache of its own, one thread per process; and a tiny model through the whole chain."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Converted checkpoints and digests of the tests stay out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A tiny llama with grouped KV heads and tied weights, as a HF directory with a tokenizer."""
    from tests import tiny

    directory = tmp_path_factory.mktemp("tiny") / "llama"
    tiny.save("llama", directory)
    return directory


@pytest.fixture(scope="session")
def tiny_artifact(tiny_checkpoint, tmp_path_factory):
    """The tiny model exported for ONNX Runtime, unquantized."""
    import optkit

    return optkit.export(tiny_checkpoint, {"target": "ort"}, tmp_path_factory.mktemp("tiny") / "artifact")


@pytest.fixture(scope="session")
def tiny_quantized(tiny_checkpoint, tmp_path_factory):
    """The tiny model as a quantized checkpoint, 4 bits in groups of 32."""
    import optkit

    return optkit.quantize(
        tiny_checkpoint, {"scheme": "w4a16", "group_size": 32}, tmp_path_factory.mktemp("tiny") / "quantized"
    )
