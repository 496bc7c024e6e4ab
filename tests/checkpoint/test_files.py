"""Finding checkpoints, naming them by content, and configs that both major versions of transformers read."""

import json
import os

import pytest

from optkit.checkpoint import files
from optkit.errors import CheckpointError


@pytest.fixture
def directory(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    for name, text in {"config.json": "{}", "model.safetensors": "weights", "tokenizer.json": "tokens"}.items():
        (made / name).write_text(text)
    return made


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_directory_and_a_gguf_file_are_found_as_they_are(directory):
    assert files.locate(directory) == directory
    gguf = directory / "model.Q4_0.GGUF"
    gguf.write_bytes(b"GGUF")
    assert files.locate(str(gguf)) == gguf


@pytest.mark.parametrize("given", ["/no/such/place", "./nowhere", "../nowhere", "~/nowhere-at-all", "a/b/c", "has space", ""])
def test_a_path_that_does_not_exist_is_one_clear_line(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if given == "":
        given = str(tmp_path / "x")
    with pytest.raises(CheckpointError, match="no such directory or file") as caught:
        files.locate(given)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_gguf_says_what_may_be_given(directory):
    with pytest.raises(CheckpointError, match=r"directory, a \.gguf file or a hub id"):
        files.locate(directory / "config.json")


def test_a_hub_id_that_is_not_cached_is_refused_offline_without_a_request(tmp_path, monkeypatch):
    """01-ai/Yi#253, openvino.genai#452: offline machines that die in the hub client."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(CheckpointError, match=r"nobody/nothing: no such directory, and as a hub id it is offline") as caught:
        files.locate("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_the_digest_is_of_the_content_and_not_of_place_or_date(directory, tmp_path):
    """Olive#1936: two models that shared a cache entry."""
    first = files.content_digest(directory)
    moved = directory.rename(tmp_path / "elsewhere")
    os.utime(moved / "config.json", (1, 1))
    assert files.content_digest(moved) == first


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
def test_the_digest_changes_with_every_file_that_matters(directory, name):
    first = files.content_digest(directory)
    (directory / name).write_text("other!")
    assert files.content_digest(directory) != first


def test_the_digest_ignores_notes_beside_the_model(directory):
    first = files.content_digest(directory)
    (directory / "README.md").write_text("notes")
    assert files.content_digest(directory) == first


def test_a_digest_is_remembered_across_processes_until_the_file_changes(directory, cache, monkeypatch):
    monkeypatch.setattr(files, "_known", {})
    path = directory / "model.safetensors"
    first = files.cached_file_digest(path)
    monkeypatch.setattr(files, "_known", {})
    monkeypatch.setattr(files.manifest, "file_digest", lambda _path: pytest.fail("read again"))
    assert files.cached_file_digest(path) == first
    monkeypatch.undo()
    monkeypatch.setenv("OPTKIT_CACHE", str(cache))
    path.write_text("changed")
    assert files.cached_file_digest(path) != first


@pytest.mark.parametrize("content", ["not json", "[]", '{"x": 3}'])
def test_a_damaged_digest_cache_is_no_error(directory, cache, monkeypatch, content):
    monkeypatch.setattr(files, "_known", {})
    cache.mkdir()
    (cache / "digests.json").write_text(content)
    assert len(files.cached_file_digest(directory / "config.json")) == 64


def test_a_cache_that_cannot_be_written_is_no_error(directory, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("OPTKIT_CACHE", str(blocked))
    assert len(files.cached_file_digest(directory / "config.json")) == 64


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[1]", "a JSON object is expected")])
def test_damaged_json_is_refused_by_name(directory, text, message):
    (directory / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        files.read_json(directory / "config.json")


def test_support_files_are_copied_with_their_folders_and_nothing_else(directory, tmp_path):
    (directory / "chat_templates").mkdir()
    (directory / "chat_templates" / "tool.jinja").write_text("t")
    for name in ("chat_template.jinja", "generation_config.json", "merges.txt", "README.md", "optkit.json"):
        (directory / name).write_text(name)
    dest = tmp_path / "dest"
    dest.mkdir()
    files.copy_support_files(directory, dest)
    found = sorted(p.relative_to(dest).as_posix() for p in dest.rglob("*") if p.is_file())
    expected = ["chat_template.jinja", "chat_templates/tool.jinja", "generation_config.json", "merges.txt", "tokenizer.json"]
    assert found == expected


def test_a_config_gets_the_old_spellings_beside_the_new_ones():
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "partial_rotary_factor": 0.5}
    out = files.portable_config({"dtype": "bfloat16", "rope_parameters": rope, "head_dim": 32})
    assert out["torch_dtype"] == "bfloat16"
    assert out["rope_theta"] == 5e5
    assert out["partial_rotary_factor"] == 0.5
    assert out["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0}
    assert out["rope_parameters"] == rope
    assert out["head_dim"] == 32


def test_plain_rope_needs_no_scaling_entry():
    out = files.portable_config({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    assert "rope_scaling" not in out
    assert out["rope_theta"] == 1e4


def test_rope_of_two_kinds_of_layers_is_spelled_as_version_4_spelled_it():
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    out = files.portable_config({"rope_parameters": rope})
    assert (out["rope_theta"], out["rope_local_base_freq"]) == (1e6, 1e4)
    assert out["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def test_old_spellings_that_are_there_are_kept_and_nested_configs_are_done_too():
    old = {"torch_dtype": "float16", "rope_theta": 7.0, "rope_scaling": None}
    assert files.portable_config(old) == old
    nested = files.portable_config({"text_config": {"rope_parameters": {"rope_theta": 3.0, "rope_type": "default"}}})
    assert nested["text_config"]["rope_theta"] == 3.0
    assert json.loads(json.dumps(nested)) == nested
