"""Several artifacts measured in turns: the order, the ratios, the sweeps, and what goes wrong."""

import json
from typing import ClassVar
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from optkit.cli import cli
from optkit.errors import EngineError, InputError, LimitError, UnsupportedError, UsageError
from optkit.runtime import compare as module
from optkit.runtime.compare import HEAD, Point, compare, points, rows


class FakeWorker:
    """Answers at once, with speeds of its own that halve in every later round."""

    log: ClassVar[list[str]] = []

    def __init__(self, artifact, backend, threads):
        self.artifact, self.opened, self.rounds = artifact, {"backend": "fake", "load_ms": 1.0}, 0

    def ask(self, message):
        if "end" in message:
            return {"peak_rss_bytes": 1}
        self.log.append(self.artifact)
        speed = {"a": 100.0, "b": 150.0}[self.artifact] / 2**self.rounds
        self.rounds += 1
        return {"decode_tokens_per_second": speed, "prefill_tokens_per_second": 10 * speed}

    def close(self):
        pass


def test_rounds_are_taken_in_turns_and_ratios_are_of_one_round(monkeypatch):
    monkeypatch.setattr(module, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "log", [])
    result = compare(["a", "b"], [Point()], rounds=3, warmup=1)
    assert FakeWorker.log == ["a", "b", "b", "a", "a", "b", "b", "a"]
    first, second = result["points"][0]["artifacts"]
    assert first["decode_tokens_per_second_rounds"] == [50.0, 25.0, 12.5], "the warm-up does not count"
    assert second["decode_ratio"] == second["prefill_ratio"] == [1.5, 1.5, 1.5], "though the speeds fell by 4 meanwhile"
    assert "decode_ratio" not in first
    assert [row[-1] for row in rows(result)] == ["-", "1.50x (1.50 to 1.50)"]
    assert all(len(row) == len(HEAD) for row in rows(result))


def test_a_sweep_changes_one_number_at_a_time():
    base = Point(8, 4, 1)
    assert points(base, []) == [base]
    assert points(base, ["batch=1,2", "prompt-tokens=16"]) == [base, Point(8, 4, 2), Point(16, 4, 1)]
    assert points(base, ["concurrency=3"])[0].label == "8 + 4 3 at a time"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("bacth=1", "did you mean 'batch'"),
        ("batch=", "whole numbers"),
        ("batch=x", "whole numbers"),
        ("batch=0", "at least 1 row"),
    ],
)
def test_a_sweep_that_says_nothing_is_refused(text, why):
    with pytest.raises(UsageError, match=why):
        points(Point(), [text])


def test_real_artifacts_are_measured_and_drawn(tiny_artifact, tmp_path):
    arguments = ["bench", str(tiny_artifact), "--compare", str(tiny_artifact), "--prompt-tokens", "4", "--new-tokens", "4"]
    arguments += ["--rounds", "2", "--sweep", "batch=1,2", "--threads", "1", "--plot", str(tmp_path / "speed.svg")]
    done = CliRunner().invoke(cli, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert [point["batch"] for point in result["points"]] == [1, 2]
    for point in result["points"]:
        low, high = point["artifacts"][1]["decode_ratio"][1:]
        assert 0 < low <= high
        assert point["artifacts"][0]["kv_bytes"] > 0
    assert all(entry["peak_rss_bytes"] > 1 << 20 and entry["load_ms"] > 0 for entry in result["artifacts"])
    drawn = ElementTree.parse(tmp_path / "speed.svg").getroot()
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    assert len([e for e in drawn.iter() if e.tag.endswith("rect")]) == 4


def test_requests_at_a_time_are_served_by_the_scheduler(artifact):
    made = artifact("llama", chunks=True)
    result = compare([made], points(Point(4, 4), ["concurrency=1,2"]), rounds=1, warmup=0, threads=1)
    assert all(point["artifacts"][0]["decode_tokens_per_second"] > 0 for point in result["points"])


def test_an_artifact_that_does_not_open_or_fails_is_named(tiny_artifact, tmp_path):
    with pytest.raises(InputError, match="no such directory"):
        compare([tmp_path / "none"], rounds=1)
    with pytest.raises(LimitError, match=r"100[ ,_]?00\d|positions"):
        compare([tiny_artifact], [Point(100_000, 2)], rounds=1)
    with pytest.raises(UnsupportedError, match="chunks"):
        compare([tiny_artifact], [Point(4, 4, 1, 2)], rounds=1)


def test_a_process_that_ends_is_an_error_with_its_last_line(monkeypatch):
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match="exit code 1"):
        compare(["a"], rounds=1)
