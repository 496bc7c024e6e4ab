"""The smoke test an artifact carries."""

import json
import shutil

import pytest

from optkit.errors import ParityError, UnsupportedError
from optkit.runtime.session import open_session
from optkit.validate.smoke import smoke

PROMPT = [1, 40, 41, 42, 43]


@pytest.fixture
def artifact(tmp_path, tiny_artifact):
    """A copy with a smoke prompt; ``artifact(tokens, margins)`` -> its directory."""

    def make(tokens, margins=None):
        copy = tmp_path / "artifact"
        shutil.copytree(tiny_artifact, copy)
        path = copy / "optkit.json"
        data = json.loads(path.read_text())
        data["facts"]["smoke"] = {"prompt": PROMPT, "tokens": tokens, "margins": margins}
        path.write_text(json.dumps(data))
        return copy

    return make


@pytest.fixture(scope="module")
def tokens(tiny_artifact):
    with open_session(tiny_artifact) as session:
        return session.generate([PROMPT], max_new_tokens=8, ignore_eos=True).tokens[0]


def test_the_expected_tokens_pass(artifact, tokens):
    assert smoke(artifact(tokens))["tokens"] == tokens


def test_other_tokens_fail_and_the_first_one_is_named(artifact, tokens):
    """TensorRT-Edge-LLM#105: a release whose quick start answers garbage, found only by reading it."""
    wrong = [*tokens[:3], (tokens[3] + 1) % 128, *tokens[4:]]
    with pytest.raises(ParityError, match=rf"smoke token 4 is {tokens[3]}, and was {wrong[3]}"):
        smoke(artifact(wrong))


def test_a_near_tie_is_no_failure(artifact, tokens):
    wrong = [*tokens[:3], (tokens[3] + 1) % 128, *tokens[4:]]
    result = smoke(artifact(wrong, margins=[9.0, 9.0, 9.0, 0.01, 9.0, 9.0, 9.0, 9.0]))
    assert result["near_tie_at"] == 3


def test_an_artifact_without_one_says_what_to_do(tiny_artifact, tmp_path):
    copy = tmp_path / "artifact"
    shutil.copytree(tiny_artifact, copy)
    path = copy / "optkit.json"
    data = json.loads(path.read_text())
    data["facts"].pop("smoke", None)
    path.write_text(json.dumps(data))
    with pytest.raises(UnsupportedError, match="carries no smoke prompt"):
        smoke(copy)
