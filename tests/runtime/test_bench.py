"""The benchmark does the work it says, and refuses what cannot be measured."""

import os
import time

import pytest

from optkit.errors import EngineError, UsageError
from optkit.runtime import bench as module
from optkit.runtime.bench import bench, bench_process, rows, since_process_start


def test_every_round_does_the_same_work_and_the_cold_one_is_apart(tiny_artifact, monkeypatch):
    calls = []
    original = module.open_session

    def watched(*args, **options):
        session = original(*args, **options)
        generate = session.generate
        session.generate = lambda prompts, **o: calls.append((prompts, o)) or generate(prompts, **o)
        return session

    monkeypatch.setattr(module, "open_session", watched)
    result = bench(tiny_artifact, prompt_tokens=5, new_tokens=4, rounds=3, warmup=2, batch=2, threads=1)
    assert len(calls) == 1 + 2 + 3
    assert all(len(prompts) == 2 and all(len(p) == 5 for p in prompts) for prompts, _ in calls)
    assert all(options["ignore_eos"] and options["max_new_tokens"] == 4 for _, options in calls)
    assert len(result["decode_tokens_per_second_rounds"]) == 3
    assert result["kv_bytes"] < 10 * 2**20
    assert any("tokens/s" in value for _, value in rows(result))


@pytest.mark.parametrize("options", [{"new_tokens": 1}, {"prompt_tokens": 0}, {"rounds": 0}, {"batch": 0}])
def test_what_cannot_be_measured_is_refused(tiny_artifact, options):
    with pytest.raises(UsageError, match="at least 1, 2, 1, 1"):
        bench(tiny_artifact, **options)


def test_in_a_process_of_its_own_the_memory_is_the_artifacts(tiny_artifact):
    result = bench_process(tiny_artifact, prompt_tokens=4, new_tokens=4, rounds=1, threads=1)
    assert result["new_tokens"] == 4
    assert 0 < result["peak_rss_bytes"] < 2**30  # a process with torch loaded would have more to hold


def test_a_failing_process_is_an_engine_error_with_its_last_line(tmp_path):
    with pytest.raises(EngineError, match=r"exit code 3: .*no such directory"):
        bench_process(tmp_path / "none", rounds=1)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the system does not say when a process started")
def test_the_age_of_the_process_grows():
    first = since_process_start()
    time.sleep(0.05)
    assert 0 < first < since_process_start()
