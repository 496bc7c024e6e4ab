"""onnxruntime-genai runs an artifact's directory as it is and makes the same greedy tokens.

Its package brings a module ``onnxruntime`` of its own, so it lives in an environment of its own, the one that
``benchmarks/bench_genai.py`` makes (``pip install``, once); hence ``slow``.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import optkit
from tests import tiny

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PROMPT_TOKENS, NEW_TOKENS = 11, 40  # past the window of 8
SCRIPT = """
import json, sys
import onnxruntime_genai as og
directory, request = sys.argv[1], json.load(sys.stdin)
model = og.Model(directory)
params = og.GeneratorParams(model)
total = len(request["prompt"]) + request["new"]
params.set_search_options(max_length=total, min_length=total, do_sample=False)
generator = og.Generator(model, params)
generator.append_tokens(request["prompt"])
while not generator.is_done():
    generator.generate_next_token()
print(json.dumps([int(token) for token in generator.get_sequence(0)]))
"""


@pytest.fixture(scope="module")
def peer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_genai", ROOT / "benchmarks" / "bench_genai.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make_environment()
    return module


def genai_tokens(peer: ModuleType, artifact: Path, prompt: list[int], new: int) -> list[int]:
    done = subprocess.run(
        [str(peer.PEER_PYTHON), "-c", SCRIPT, str(artifact)],
        input=json.dumps({"prompt": prompt, "new": new}), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout.strip().splitlines()[-1]))[len(prompt) :]


def our_tokens(artifact: Path, prompt: list[int], new: int) -> list[int]:
    session = optkit.open_session(str(artifact))
    return list(session.generate([prompt], max_new_tokens=new, ignore_eos=True, do_sample=False).tokens[0])


@pytest.mark.parametrize(
    ("name", "scheme", "options"),
    [
        ("llama", None, {}),
        ("llama_mqa", None, {}),
        ("mistral", None, {}),
        ("qwen3", None, {}),
        ("gemma2", None, {}),
        ("gpt2", None, {}),
        ("mixtral", None, {}),
        ("llama_tied", "w4a16", {}),
        ("llama_tied", "w8a16", {}),
        ("llama", None, {"dtype": "fp16"}),
    ],
)
def test_onnxruntime_genai_makes_the_same_greedy_tokens(artifact_of, peer, name, scheme, options) -> None:
    artifact = artifact_of(name, scheme, (("group_size", 32),) if scheme else (), **options)
    for seed in (0, 1):
        prompt = np.random.default_rng(seed).integers(4, tiny.VOCAB, PROMPT_TOKENS).tolist()
        want = our_tokens(artifact, prompt, NEW_TOKENS)
        assert len(want) == NEW_TOKENS
        assert genai_tokens(peer, artifact, prompt, NEW_TOKENS) == want


def test_a_changed_graph_makes_other_tokens(artifact_of, peer, tmp_path) -> None:
    """The comparison can fail: the same prompt, another model's artifact."""
    prompt = np.random.default_rng(0).integers(4, tiny.VOCAB, PROMPT_TOKENS).tolist()
    other = genai_tokens(peer, artifact_of("llama_mqa"), prompt, NEW_TOKENS)
    assert other != our_tokens(artifact_of("llama"), prompt, NEW_TOKENS)
