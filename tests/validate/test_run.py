"""``validate`` as a whole, on sessions without an engine: checks, limits and the report's files."""

import html.parser
import json
import re

import numpy as np
import pytest

from optkit.errors import StorageError, UsageError
from optkit.recipe import Limits, ValidateRecipe
from optkit.validate import compare, plots
from optkit.validate.page import to_html
from optkit.validate.report import to_markdown, write_report
from optkit.validate.run import validate
from tests.validate.fake import FakeSession

SMALL = ValidateRecipe(rows=3, prompt_tokens=10, decode_steps=12, greedy_tokens=20, perplexity_tokens=200, window=50)


def run(candidate=None, **options):
    return validate(candidate or FakeSession(), FakeSession(), settings=options.pop("settings", SMALL), **options)


def failed(report):
    return [check.name for check in report.failures]


def test_a_model_beside_itself_passes_the_tightest_limits():
    report = run(limits=Limits(kl_mean=0.0, kl_max=0.0, top1_agreement=1.0, logit_error=0.0, greedy_match=1.0))
    assert report.passed
    assert report.value("kl_mean") == 0.0
    assert len(report.checks) == 7  # the five limits, non-finite answers, a repeated token


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"kl_mean": 1e-4}, "kl_mean"),
        ({"kl_max": 1e-4}, "kl_max"),
        ({"top1_agreement": 0.999}, "top1_agreement"),
        ({"logit_error": 1e-3}, "logit_error"),
        ({"greedy_match": 1.0}, "greedy_match"),
    ],
)
def test_each_limit_fails_a_noisy_candidate_and_the_message_has_both_numbers(limits, name):
    report = run(FakeSession(noise=2.0), limits=limits)
    assert failed(report) == [name]
    value = report.value(name)
    assert f"{name} is {value:.4g}" in report.failures[0].describe()
    assert "is allowed" in report.failures[0].describe()


def test_a_slightly_noisy_candidate_passes_loose_limits():
    assert run(FakeSession(noise=0.01), limits=Limits(kl_mean=0.01, top1_agreement=0.9)).passed


def test_a_limit_on_something_that_was_not_measured_is_an_error_and_not_a_pass():
    with pytest.raises(UsageError, match="perplexity_delta: not measured"):
        run(limits=Limits(perplexity_delta=0.1))


def test_a_candidate_that_repeats_one_token_fails_though_no_limit_is_set():
    """AutoGPTQ#761, GPTQModel#2423: a broken kernel answers "!!!!" for ever."""

    def stuck(logits, _):
        logits[:, 5] = logits.max() + 9
        return logits

    report = run(FakeSession(flaw=stuck))
    assert failed(report) == ["repeated_token"]


def test_a_reference_that_repeats_as_well_is_no_fault_of_the_candidate():
    def stuck(logits, _):
        logits[:, 5] = logits.max() + 9
        return logits

    assert validate(FakeSession(flaw=stuck), FakeSession(flaw=stuck), settings=SMALL).passed


def test_non_finite_answers_fail():
    def broken(logits, length):
        return np.full_like(logits, np.nan) if length == 14 else logits

    with np.errstate(invalid="ignore"):
        report = run(FakeSession(flaw=broken))
    assert "non_finite_logits" in failed(report)


def test_drift_after_many_steps_is_only_seen_with_long_steps():
    """GPTQ-for-LLaMa#91: perplexity perfect, garbage past 128 tokens, where decode switched to another kernel."""

    def late(logits, length):
        return logits[:, ::-1].copy() if length > 128 else logits

    limits = Limits(kl_max=1e-6)
    assert run(FakeSession(flaw=late), limits=limits).passed
    report = run(FakeSession(flaw=late), limits=limits, long_steps=300)
    assert failed(report) == ["kl_max"]
    curve = report.comparisons[0].series["kl_by_step_max"]
    assert next(i for i, value in enumerate(curve) if value > 1e-6) == 128 - SMALL.prompt_tokens + 1


def test_an_unquantized_float32_candidate_is_held_to_a_tight_limit_by_default():
    comparer = compare.Comparer(SMALL, FakeSession(noise=0.01), {"quantized": False, "dtype": "fp32"})
    result = comparer.compare("t", FakeSession(), "reference", Limits())
    check = next(c for c in result.checks if c.name == "logit_error")
    assert check.limit == compare.UNQUANTIZED_LOGIT_ERROR
    assert not check.passed


def test_a_quantized_candidate_has_no_default_limit_on_its_logits():
    comparer = compare.Comparer(SMALL, FakeSession(noise=0.01), {"quantized": True, "dtype": "fp32"})
    result = comparer.compare("t", FakeSession(), "reference", Limits())
    assert [c.name for c in result.checks] == ["non_finite_logits", "repeated_token"]


def test_the_checkpoint_is_compared_by_itself_with_its_own_limits():
    report = run(
        FakeSession(noise=0.5),
        checkpoint=FakeSession(noise=0.5),
        limits=Limits(kl_mean=1.0),
        checkpoint_limits=Limits(kl_mean=1e-9),
    )
    assert len(report.comparisons) == 2
    assert [(c.name, c.limit) for c in report.failures] == [("kl_mean", 1e-9)]


def test_a_model_without_a_tokenizer_is_compared_on_random_ids_and_says_so():
    report = run()
    assert report.value("perplexity_delta") is None
    assert any("random token ids" in note for note in report.notes)


def test_progress_is_told_in_steps():
    seen = []
    run(progress=lambda text, done=None, total=None: seen.append((text, done, total)))
    steps = [(done, total) for text, done, total in seen if text == "comparing step by step"]
    assert steps[-1][0] == steps[-1][1] == 3 * 13


# ── the report's files ───────────────────────────────────────────────────────────────────────────────────────────────


class Page(html.parser.HTMLParser):
    """Collects tags and checks that they are closed in order."""

    VOID = ("meta", "br", "line", "path", "img", "link", "hr")

    def __init__(self):
        super().__init__()
        self.stack, self.seen, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag


def test_the_report_is_written_in_three_formats_that_agree(tmp_path):
    report = run(FakeSession(noise=0.5), limits=Limits(kl_mean=1e-9), report_dir=tmp_path)
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["passed"] is False
    assert data["comparisons"][0]["checks"][0]["passed"] is False
    assert data["comparisons"][0]["metrics"][0] == {
        "name": "kl_mean",
        "value": report.value("kl_mean"),
        "unit": "nats",
        **{key: data["comparisons"][0]["metrics"][0][key] for key in ("label", "note")},
    }
    markdown = (tmp_path / "report.md").read_text()
    assert "**FAIL**" in markdown
    assert "Failed: 1 of 3 checks" in markdown
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]


def test_the_html_is_well_formed_self_contained_and_has_its_plots(tmp_path):
    page = Page()
    text = to_html(run(FakeSession(noise=0.5)))
    page.feed(text)
    assert page.stack == []
    assert page.seen.count("svg") == 3  # KL by step, histogram of errors, agreement by case
    assert page.links == []
    assert "http" not in re.sub(r"<code>.*?</code>", "", text)
    assert "<script" not in text
    assert "viewport" in text
    assert "@media print" in text


def test_names_are_escaped():
    report = run()
    report.candidate = {"name": "<script>alert(1)</script>", "backend": "a&b"}
    assert "<script" not in to_html(report)
    assert "a&amp;b" in to_html(report)


def test_numbers_that_are_not_finite_are_valid_json(tmp_path):
    def broken(logits, length):
        return np.full_like(logits, np.nan) if length == 14 else logits

    with np.errstate(invalid="ignore"):
        report = run(FakeSession(flaw=broken), report_dir=tmp_path)

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    data = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert data["passed"] is False
    assert "nan" in to_markdown(report)


def test_a_report_that_cannot_be_written_is_a_storage_error(tmp_path, monkeypatch):
    import errno
    import pathlib

    def full(self, *args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    report = run()
    monkeypatch.setattr(pathlib.Path, "write_text", full)
    with pytest.raises(StorageError, match="no space left"):
        write_report(report, tmp_path / "report")


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.037), (0, 1e-9), (0, 12345), (-3, 3), (0, 0)])
def test_axis_ticks_are_round_few_and_cover_the_data(low, high):
    ticks = plots.nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high * (1 - 1e-9)
    assert 2 <= len(ticks) <= 8


def test_the_histogram_counts_every_value_once():
    values = [0.0, 1e-7, 2e-7, 5e-3, float("inf"), float("nan")]
    svg = plots.histogram(values, "x", "y", "t")
    assert sum(int(n) for n in re.findall(r"<title>(\d+)</title>", svg)) == len(values)


def test_a_line_chart_leaves_a_gap_where_a_value_is_missing():
    svg = plots.line_chart([("a", [1.0, float("nan"), 2.0])], "x", "y", "t")
    assert re.search(r'd="M[\d. ]+M[\d. ]+"', svg)
