"""The build's cache and resume on stages that cost nothing, and one real build of a tiny model."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from optkit.build import cache
from optkit.build.run import build
from optkit.build.summary import summary_rows
from optkit.errors import CheckpointError, UsageError
from optkit.manifest import Manifest, read_manifest, staged_directory, write_manifest
from optkit.recipe import BenchRecipe, ExportRecipe, QuantizeRecipe, Recipe, SampleRecipe, ValidateRecipe

ROOT = Path(__file__).parent.parent.parent
STAGES = ["quantize", "export", "validate", "bench", "sample"]


class Stages:
    """Stands in for the five stages: counts calls and writes directories whose content depends on their inputs."""

    def __init__(self):
        self.calls = []
        self.failures = []
        self.fail_in = None

    def _enter(self, stage):
        self.calls.append(stage)
        if self.fail_in == stage:
            raise RuntimeError(f"{stage} broke")

    def _write(self, out, kind, text):
        with staged_directory(out) as staging:
            (staging / "content").write_text(text)
            write_manifest(staging, Manifest(kind, {"digest": text}, {}, {}, None, {}))
        return Path(out)

    def quantize(self, model, section, out, progress=None):
        self._enter("quantize")
        return self._write(out, "quantized-checkpoint", Path(model, "config.json").read_text() + str(section))

    def export(self, source, section, out, progress=None):
        self._enter("export")
        return self._write(out, "artifact", str(section) + Path(source, "optkit.json").read_text())

    def validate(self, candidate, reference, report_dir=None, **options):
        self._enter("validate")
        report_dir.mkdir(parents=True, exist_ok=True)
        (report_dir / "report.html").write_text("<html>")
        metric = SimpleNamespace(name="kl_mean", value=0.5)
        checks = [SimpleNamespace(describe=lambda text=text: text) for text in self.failures]
        return SimpleNamespace(comparisons=[SimpleNamespace(metrics=[metric])], failures=checks, checks=checks)

    def bench_process(self, artifact, **options):
        self._enter("bench")
        return {"decode_tokens_per_second": 1.0, **options}

    def open_session(self, artifact, **options):
        self._enter("sample")
        event = SimpleNamespace(text="hello")
        return SimpleNamespace(
            stream=lambda *a, **k: iter([event]), close=lambda: None, has_tokenizer=False, directory=artifact
        )


@pytest.fixture
def stages(monkeypatch):
    made = Stages()
    monkeypatch.setitem(sys.modules, "optkit.quantize.run", SimpleNamespace(quantize=made.quantize))
    monkeypatch.setitem(sys.modules, "optkit.export.run", SimpleNamespace(export=made.export))
    monkeypatch.setitem(sys.modules, "optkit.validate.run", SimpleNamespace(validate=made.validate))
    monkeypatch.setattr("optkit.runtime.bench.bench_process", made.bench_process)
    monkeypatch.setattr("optkit.runtime.session.open_session", made.open_session)
    monkeypatch.setattr("optkit.build.stages.weight_bytes", lambda model: 1000)
    return made


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights one")
    return directory


def recipe(model, **changes):
    sections = {
        "quantize": QuantizeRecipe(),
        "export": ExportRecipe(),
        "validate": ValidateRecipe(),
        "bench": BenchRecipe(),
        "sample": SampleRecipe(),
    }
    return Recipe(model=str(model), name="tiny", **{**sections, **changes})


def run(stages, made, tmp_path, **options):
    """The stages that ran."""
    stages.calls.clear()
    build(made, tmp_path / "out", **options)
    return list(stages.calls)


def test_all_stages_run_in_order_and_a_second_run_reuses_them_all(stages, model, tmp_path):
    assert run(stages, recipe(model), tmp_path) == STAGES
    assert run(stages, recipe(model), tmp_path) == []
    result = build(recipe(model), tmp_path / "out")
    assert list(result.reused) == STAGES
    assert result.stages["validate"]["metrics"] == {"kl_mean": 0.5}


def test_force_runs_everything_again(stages, model, tmp_path):
    run(stages, recipe(model), tmp_path)
    assert run(stages, recipe(model), tmp_path, force=True) == STAGES


@pytest.mark.parametrize(
    ("changes", "again"),
    [
        ({"quantize": QuantizeRecipe(group_size=64)}, STAGES),
        ({"export": ExportRecipe(max_seq_len=64)}, STAGES[1:]),
        ({"validate": ValidateRecipe(seed=1)}, ["validate"]),
        ({"bench": BenchRecipe(new_tokens=5)}, ["bench"]),
        ({"sample": SampleRecipe(prompt="other")}, ["sample"]),
    ],
    ids=["quantize", "export", "validate", "bench", "sample"],
)
def test_a_changed_section_runs_its_stage_and_what_follows_from_it(stages, model, tmp_path, changes, again):
    run(stages, recipe(model), tmp_path)
    assert run(stages, recipe(model, **changes), tmp_path) == again


def test_another_model_at_the_same_path_shares_nothing(stages, model, tmp_path):
    """Olive#1936: two different models share a cache entry because the key is the path."""
    run(stages, recipe(model), tmp_path)
    (model / "model.safetensors").write_bytes(b"weights two")
    assert "quantize" in run(stages, recipe(model), tmp_path)
    (model / "config.json").write_text('{"a": 1}')
    assert run(stages, recipe(model), tmp_path) == STAGES


def test_the_same_model_at_another_path_is_the_same_model(stages, model, tmp_path):
    run(stages, recipe(model), tmp_path)
    moved = model.rename(tmp_path / "elsewhere")
    os.utime(moved / "model.safetensors", (time.time() - 1000, time.time() - 1000))
    assert run(stages, recipe(moved), tmp_path) == []


def test_a_text_file_counts_by_its_content(stages, model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one")
    made = recipe(model, validate=ValidateRecipe(text=str(text)))
    run(stages, made, tmp_path)
    text.write_text("two")
    assert run(stages, made, tmp_path) == ["validate"]


def test_another_library_version_or_changed_code_runs_the_stage_again(stages, model, tmp_path, monkeypatch):
    run(stages, recipe(model), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "library_versions", lambda *names: {"torch": "99"})
        assert run(stages, recipe(model), tmp_path) == STAGES
    real = cache.code_digest
    run(stages, recipe(model), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "code_digest", lambda stage: "changed" if stage == "validate" else real(stage))
        assert "validate" in run(stages, recipe(model), tmp_path)


def test_a_failed_stage_keeps_the_finished_ones(stages, model, tmp_path):
    stages.fail_in = "validate"
    with pytest.raises(RuntimeError):
        build(recipe(model), tmp_path / "out")
    assert not (tmp_path / "out" / "tiny" / "optkit.json").exists()
    stages.fail_in = None
    assert run(stages, recipe(model), tmp_path) == ["validate", "bench", "sample"]


def test_a_damaged_result_is_made_again(stages, model, tmp_path):
    run(stages, recipe(model), tmp_path)
    (tmp_path / "out" / "tiny" / "artifact" / "content").write_text("short")
    assert run(stages, recipe(model), tmp_path) == ["export"]  # the same bytes come out, so nothing follows from it
    (tmp_path / "out" / "tiny" / "stages" / "bench.json").write_text("{")
    assert run(stages, recipe(model), tmp_path) == ["bench"]


def test_an_unquantized_recipe_exports_the_model_itself(stages, model, tmp_path):
    (model / "optkit.json").write_text("")
    assert run(stages, recipe(model, quantize=None), tmp_path) == STAGES[1:]
    assert not (tmp_path / "out" / "tiny" / "checkpoint").exists()


def test_sections_that_are_left_out_are_not_run(stages, model, tmp_path):
    assert run(stages, recipe(model, validate=None, bench=None, sample=None), tmp_path) == ["quantize", "export"]


def test_an_exceeded_limit_is_a_failure_of_the_result_and_the_rest_still_runs(stages, model, tmp_path):
    stages.failures = ["kl_mean is 0.5 nats, and at most 0.1 is allowed"]
    assert run(stages, recipe(model), tmp_path) == STAGES
    result = build(recipe(model), tmp_path / "out")
    assert result.failures == ("kl_mean is 0.5 nats, and at most 0.1 is allowed",)


def test_the_builds_manifest_records_source_recipe_and_numbers_and_is_not_rewritten(stages, model, tmp_path):
    run(stages, recipe(model), tmp_path)
    directory = tmp_path / "out" / "tiny"
    manifest = read_manifest(directory, kind="build")
    assert manifest.recipe["quantize"]["scheme"] == "w4a16"
    assert manifest.facts["stages"]["validate"]["metrics"]["kl_mean"] == 0.5
    assert len(manifest.source["digest"]) == 64
    before = (directory / "optkit.json").stat().st_mtime_ns
    run(stages, recipe(model), tmp_path)
    assert (directory / "optkit.json").stat().st_mtime_ns == before


def test_somebody_elses_directory_is_left_alone(stages, model, tmp_path):
    (tmp_path / "out" / "tiny").mkdir(parents=True)
    (tmp_path / "out" / "tiny" / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="not empty and not a build"):
        build(recipe(model), tmp_path / "out")
    assert stages.calls == []


def test_two_builds_in_one_place_do_not_mix(stages, model, tmp_path):
    directory = tmp_path / "out" / "tiny"
    with cache.locked(directory), pytest.raises(UsageError, match="another optkit build is at work here"):
        build(recipe(model), tmp_path / "out")
    assert run(stages, recipe(model), tmp_path) == STAGES


def test_a_missing_model_is_found_before_anything_is_written(stages, tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        build(recipe("/nowhere/model"), tmp_path / "out")
    assert stages.calls == []


def test_the_code_digest_covers_the_stage_and_not_the_command_line(tmp_path):
    def digest(*changed):
        package = tmp_path / "-".join(changed or ("none",)).replace("/", "_")
        for name in (
            "cli.py",
            "errors.py",
            "runtime/session.py",
            "runtime/backends/ort.py",
            "validate/run.py",
            "export/run.py",
        ):
            path = package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("changed" if name in changed else "same")
        return {stage: cache.code_digest(stage, package) for stage in STAGES}

    def differs(*changed):
        before, after = digest(), digest(*changed)
        return [stage for stage in STAGES if before[stage] != after[stage]]

    assert differs("cli.py") == []
    assert differs("errors.py") == STAGES
    assert differs("runtime/backends/ort.py") == ["validate", "bench", "sample"]
    assert differs("validate/run.py") == ["validate"]
    assert differs("export/run.py") == ["export"]


# ── with the real stages ─────────────────────────────────────────────────────────────────────────────────────────────

RECIPE = """
model: {model}
name: real
quantize: {{scheme: w4a16, group_size: 32}}
export: {{target: ort, max_seq_len: 128}}
validate:
  text: random
  rows: 2
  prompt_tokens: 8
  decode_steps: 8
  greedy_tokens: 8
  perplexity_tokens: 0
  limits: {{kl_mean: 100}}
  export_limits: {{kl_mean: 0.05}}
bench: {{prompt_tokens: 4, new_tokens: 4, rounds: 1, threads: 1}}
sample: {{prompt: "a b c", max_new_tokens: 6}}
"""


def written(tmp_path, model):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(model=model))
    return path


def test_a_tiny_model_goes_through_the_whole_chain_and_a_second_run_reuses_it(tmp_path, tiny_checkpoint, capsys):
    import io

    path, out, stream = written(tmp_path, tiny_checkpoint), tmp_path / "out", io.StringIO()
    result = build(path, out, stream=stream)
    assert result.failures == ()
    assert {p.name for p in result.directory.iterdir()} == {
        "checkpoint", "artifact", "report", "bench.json", "sample.txt", "stages", "optkit.json",
    }  # fmt: skip
    assert read_manifest(result.artifact).kind == "artifact"
    assert read_manifest(result.checkpoint).kind == "quantized-checkpoint"
    data = json.loads((result.directory / "report" / "report.json").read_text())
    assert [c["title"].split(":")[0] for c in data["comparisons"]] == ["Against the reference", "The export step"]
    assert stream.getvalue().startswith("> a b c\n\n")
    assert result.stages["sample"]["text"] in stream.getvalue()
    rows = {row[0]: row[1] for row in summary_rows(result)}
    assert {"artifact", "KL from the reference", "top-1 agreement", "time to first token", "decode", "checks"} <= set(rows)
    again = build(path, out)
    assert list(again.reused) == STAGES
    assert again.stages == result.stages


KILLED = textwrap.dedent("""
    import os, signal, sys
    from optkit.build import stages
    stage = sys.argv[3]
    original = stages.Work._stage
    def killed(self, name, *rest):
        if name == stage:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, name, *rest)
    stages.Work._stage = killed
    from optkit.build.run import build
    build(sys.argv[1], sys.argv[2])
""")


def test_a_killed_build_is_resumed_where_it_was(tmp_path, tiny_checkpoint):
    path, out = written(tmp_path, tiny_checkpoint), tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), str(out), "export"], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (out / "real" / "optkit.json").exists()
    result = build(path, out)
    assert list(result.reused) == ["quantize"]
