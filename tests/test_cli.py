"""The command line: what goes where, exit codes, and one clear line for everything that can be wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import optkit
from optkit import errors
from optkit._options import merge, quantize_section
from optkit.cli import cli, run
from optkit.errors import RecipeError, UsageError
from optkit.recipe import ExportRecipe, Recipe

ROOT = Path(__file__).parent.parent
COMMANDS = ("quantize", "export", "validate", "build", "generate", "bench", "inspect", "doctor")


@pytest.fixture(autouse=True)
def normal_verbosity(monkeypatch):
    import warnings

    monkeypatch.setattr("optkit.cli._verbosity", 0)
    with warnings.catch_warnings():
        yield


def call(capsys, *arguments):
    """Exit code, standard output and standard error of one command, in this process."""
    code = run([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def one_line_error(err):
    """The error line; fails on a traceback or on a second line."""
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    assert err.rstrip().endswith(lines[0])
    return lines[0]


def process(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "optkit", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, check=False, **options
    )


# ── help, versions, usage ────────────────────────────────────────────────────────────────────────────────────────────


def test_every_stage_is_a_command():
    assert set(cli.commands) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_every_option_a_description(capsys, command):
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert "--help" in out
    for parameter in cli.commands[command].params:
        if parameter.param_type_name == "option" and parameter.name not in ("help",):
            assert parameter.help or getattr(parameter, "show_default", False), f"{command} {parameter.opts} says nothing"


def test_the_version_is_the_packages(capsys):
    code, out, _ = call(capsys, "--version")
    assert (code, out.strip()) == (0, f"optkit, version {optkit.__version__}")


@pytest.mark.parametrize("arguments", [("frobnicate",), ("export",), ("generate", "x", "--top-p", "2"), ("quantize", "m")])
def test_wrong_usage_exits_with_2_and_says_what_is_missing(capsys, arguments):
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert "Error" in err
    assert "Traceback" not in err


def test_options_are_spelled_as_the_ecosystem_spells_them():
    spelled = {name for parameter in cli.commands["generate"].params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert spelled >= {
        "--max-new-tokens",
        "--do-sample",
        "--greedy",
        "--temperature",
        "--top-k",
        "--top-p",
        "--seed",
        "--prompt",
    }


# ── bad input: one line, the right code, nothing half-written ────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("quantize", "/nowhere/model", "-o", "{out}"), 3),
        (("export", "/nowhere/model", "-o", "{out}"), 3),
        (("generate", "/nowhere/artifact", "--prompt", "x"), 3),
        (("bench", "/nowhere/artifact"), 3),
        (("validate", "/nowhere/artifact", "--reference", "/nowhere/model"), 3),
        (("validate", "/nowhere/artifact", "--smoke"), 3),
        (("inspect", "/nowhere"), 3),
        (("build", "/nowhere/recipe.yaml", "-o", "{out}"), 2),
        (("export", "org/model-that-is-not-in-the-cache", "-o", "{out}"), 3),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else str(value),
)
def test_a_missing_path_is_one_line_that_names_it(capsys, tmp_path, arguments, code):
    out_dir = tmp_path / "out"
    found, out, err = call(capsys, *(a.format(out=out_dir) for a in arguments))
    assert found == code
    assert out == ""
    assert "nowhere" in one_line_error(err) or "org/model-that-is-not-in-the-cache" in one_line_error(err)
    assert not out_dir.exists()


def damaged_copy(checkpoint, target, damage):
    shutil.copytree(checkpoint, target)
    damage(target)
    return target


@pytest.mark.parametrize("command", ["quantize", "export"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: os.truncate(d / "model.safetensors", (d / "model.safetensors").stat().st_size - 100), "truncated"),
        (lambda d: os.truncate(d / "model.safetensors", 6), "truncated"),
        (lambda d: (d / "model.safetensors").unlink(), "model.safetensors"),
        (lambda d: (d / "config.json").unlink(), "config.json"),
        (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
    ],
    ids=["truncated data", "truncated header", "no weights", "no config", "broken config"],
)
def test_a_damaged_checkpoint_is_one_line_with_the_file_and_no_directory(
    capsys, tmp_path, tiny_checkpoint, command, damage, words
):
    model = damaged_copy(tiny_checkpoint, tmp_path / "model", damage)
    code, out, err = call(capsys, command, model, "-o", tmp_path / "out")
    assert code == errors.CheckpointError.exit_code
    assert out == ""
    assert words in one_line_error(err)
    assert str(model) in one_line_error(err)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_an_unsupported_architecture_is_named_and_exits_with_4(capsys, tmp_path, tiny_checkpoint):
    def rename(directory):
        path = directory / "config.json"
        data = json.loads(path.read_text())
        path.write_text(json.dumps({**data, "model_type": "gpt_17", "architectures": ["Gpt17ForCausalLM"]}))

    model = damaged_copy(tiny_checkpoint, tmp_path / "model", rename)
    code, _, err = call(capsys, "export", model, "-o", tmp_path / "out")
    assert code == errors.UnsupportedError.exit_code
    assert "gpt_17" in one_line_error(err)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_a_group_size_that_does_not_divide_names_every_layer_and_the_sizes_that_do(capsys, tmp_path, tiny_checkpoint):
    code, _, err = call(capsys, "quantize", tiny_checkpoint, "-o", tmp_path / "out", "--scheme", "w4a16", "--group-size", "128")
    assert code == errors.UsageError.exit_code
    line = one_line_error(err)
    assert "group_size 128 does not divide the 64 inputs" in line
    for layer in (0, 1):
        for name in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        ):
            assert f"layers.{layer}.{name}" in line
    assert "use 16 or 32 or 64, or channel" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: m\nquantize: {grup_size: 32}", "unknown key 'quantize.grup_size' (did you mean 'group_size'?)"),
        ("model: m\nexprot: {}", "unknown key 'exprot' (did you mean 'export'?)"),
        ("model: /nowhere/model", "/nowhere/model: no such directory"),
    ],
)
def test_a_wrong_recipe_is_one_line_and_leaves_no_artifact(capsys, tmp_path, text, words):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    code, out, err = call(capsys, "build", recipe, "-o", tmp_path / "out")
    assert code in (2, 3)
    assert out == ""
    assert words in one_line_error(err)
    assert not list(tmp_path.rglob("optkit.json"))


def test_a_prompt_longer_than_the_limit_is_refused_before_running(capsys, tiny_artifact):
    code, out, err = call(capsys, "generate", tiny_artifact, "--no-chat", "--prompt", "a b c " * 300)
    assert code == errors.LimitError.exit_code
    assert out == ""
    assert re.search(r"\d+ tokens.*256", one_line_error(err))


def test_a_benchmark_that_does_not_fit_is_refused(capsys, tiny_artifact):
    code, _, err = call(capsys, "bench", tiny_artifact, "--prompt-tokens", 200, "--new-tokens", 100)
    assert code == errors.LimitError.exit_code
    assert re.search(r"300 positions.* 256", one_line_error(err))


@pytest.mark.parametrize("command", ["quantize", "export"])
def test_a_full_disk_is_one_line_and_leaves_no_directory(capsys, tmp_path, tiny_checkpoint, monkeypatch, command):
    import errno

    import optkit.manifest

    def full(directory, manifest):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(optkit.manifest, "write_manifest", full)
    monkeypatch.setattr(f"optkit.{command}.run.write_manifest", full, raising=False)
    code, _, err = call(capsys, command, tiny_checkpoint, "-o", tmp_path / "out")
    assert code == errors.StorageError.exit_code
    assert "no space left on the device" in one_line_error(err)
    assert list(tmp_path.iterdir()) == []


def test_a_really_full_file_system_is_the_same_line(tmp_path, tiny_checkpoint):
    """On a file system of 64 kB, where this can be had (Linux, as root)."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        done = process("quantize", tiny_checkpoint, "-o", place / "out")
        assert done.returncode == errors.StorageError.exit_code, done.stderr
        assert "no space left on the device" in one_line_error(done.stderr)
        assert list(place.iterdir()) == []
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_an_output_that_holds_somebodys_files_is_refused(capsys, tmp_path, tiny_checkpoint):
    (tmp_path / "notes.txt").write_text("mine")
    code, _, err = call(capsys, "export", tiny_checkpoint, "-o", tmp_path)
    assert code == errors.UsageError.exit_code
    assert "not an optkit directory" in one_line_error(err)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_truncated_artifact_is_found_before_it_runs(capsys, tmp_path, tiny_artifact):
    copy = damaged_copy(tiny_artifact, tmp_path / "a", lambda d: os.truncate(d / "model.onnx.data", 100))
    code, _, err = call(capsys, "generate", copy, "--prompt", "x")
    assert code == errors.ArtifactError.exit_code
    assert "model.onnx.data: 100 bytes" in one_line_error(err)


def test_an_unexpected_error_is_one_line_with_advice_and_the_traceback_comes_with_v(capsys, monkeypatch):
    def broken(path, digests):
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr("optkit.inspection.inspect_path", broken)
    code, _, err = call(capsys, "inspect", ".")
    assert code == 1
    assert "two lines (ZeroDivisionError" in one_line_error(err)
    assert "run again with -v" in err
    code, _, err = call(capsys, "inspect", ".", "-v")
    assert code == 1
    assert "Traceback" in err


def test_an_interrupt_exits_with_130_and_no_traceback(capsys, monkeypatch):
    def interrupted(path, digests):
        raise KeyboardInterrupt

    monkeypatch.setattr("optkit.inspection.inspect_path", interrupted)
    code, _, err = call(capsys, "inspect", ".")
    assert (code, err) == (130, "interrupted\n")


def test_a_reader_that_leaves_early_is_no_error(tiny_artifact):
    command = f"{sys.executable} -m optkit inspect {tiny_artifact} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode in (0, 141)
    assert done.stderr == ""


# ── what the commands print ──────────────────────────────────────────────────────────────────────────────────────────


def test_quantize_and_export_write_a_directory_and_say_what_it_is(capsys, tmp_path, tiny_checkpoint):
    code, out, err = call(
        capsys, "quantize", tiny_checkpoint, "-o", tmp_path / "q", "--group-size", "32", "--method", "rtn", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["kind"] == "quantized-checkpoint"
    assert "quantizing" in err  # progress is on standard error, in plain lines
    code, out, err = call(
        capsys, "export", tmp_path / "q", "-o", tmp_path / "a", "--target", "ort", "--max-seq-len", "64", "-q"
    )
    assert code == 0, err
    assert out.startswith(f"{tmp_path / 'a'}: artifact, ")
    assert err == ""


def test_generate_prints_the_text_and_nothing_else_and_agrees_with_json(capsys, tiny_artifact):
    options = ("--no-chat", "--prompt", "a b c", "--max-new-tokens", 8)
    code, out, err = call(capsys, "generate", tiny_artifact, *options)
    assert (code, err) == (0, "")
    code, as_json, _ = call(capsys, "generate", tiny_artifact, *options, "--json")
    data = json.loads(as_json)
    assert data["text"] + "\n" == out
    assert len(data["tokens"]) == data["stats"]["new_tokens"] <= 8
    assert data["stats"]["prefills"] == 1
    assert data["stats"]["decodes"] == len(data["tokens"]) - 1


def test_the_same_seed_gives_the_same_text_and_a_sampling_option_means_sampling(capsys, tiny_artifact):
    base = ("generate", tiny_artifact, "--no-chat", "--prompt", "a b", "--max-new-tokens", 12, "--json")

    def tokens(*options):
        code, out, err = call(capsys, *base, *options)
        assert code == 0, err
        return json.loads(out)["tokens"]

    hot = ("--temperature", "3")
    assert tokens(*hot, "--seed", 1) == tokens(*hot, "--seed", 1) == tokens(*hot, "--seed", 1, "--do-sample")
    assert len({tuple(tokens(*hot, "--seed", seed)) for seed in range(4)}) > 1
    assert tokens() == tokens("--greedy") == tokens("--temperature", "0")


def test_greedy_with_a_sampling_filter_is_refused(capsys, tiny_artifact):
    code, _, err = call(capsys, "generate", tiny_artifact, "--prompt", "x", "--greedy", "--top-p", "0.9")
    assert code == 2
    assert "leave out --top-p" in one_line_error(err)


def test_the_prompt_comes_from_an_option_a_file_or_standard_input(capsys, tmp_path, tiny_artifact, monkeypatch):
    import io

    file = tmp_path / "prompt.txt"
    file.write_text("a b c", encoding="utf-8")
    base = ("generate", tiny_artifact, "--no-chat", "--max-new-tokens", 4)
    expected = call(capsys, *base, "--prompt", "a b c")
    assert expected[0] == 0
    assert call(capsys, *base, "--prompt-file", file) == expected
    monkeypatch.setattr("sys.stdin", io.StringIO("a b c"))
    assert call(capsys, *base, "--prompt", "-") == expected
    code, _, err = call(capsys, *base, "--prompt", "x", "--prompt-file", file)
    assert code == 2
    assert "give one prompt" in one_line_error(err)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code, _, err = call(capsys, *base)
    assert code == 2
    assert "there is no prompt" in one_line_error(err)


def test_validate_passes_an_export_beside_its_checkpoint_and_writes_the_report(
    capsys, tmp_path, tiny_checkpoint, tiny_artifact
):
    report = tmp_path / "report"
    sizes = (
        "--rows",
        2,
        "--prompt-tokens",
        8,
        "--decode-steps",
        8,
        "--greedy-tokens",
        8,
        "--text",
        "random",
        "--perplexity-tokens",
        0,
    )
    options = ("validate", tiny_artifact, "--reference", tiny_checkpoint, "--report", report, *sizes)
    code, out, err = call(capsys, *options, "--json", "--limit", "logit_error=1e-4", "--limit", "kl_mean=1e-6")
    assert code == 0, err
    data = json.loads(out)
    assert data["passed"] is True
    assert {"kl_mean", "logit_error"} <= {check["name"] for check in data["comparisons"][0]["checks"]}
    assert (report / "report.html").is_file()
    code, out, err = call(capsys, *options, "--limit", "kl_mean=-1")
    assert code == errors.ParityError.exit_code
    assert "kl_mean is" in one_line_error(err)
    assert "FAIL" in out


def test_validate_without_a_reference_says_what_is_missing(capsys, tiny_artifact):
    code, _, err = call(capsys, "validate", tiny_artifact)
    assert code == 2
    assert "--reference" in one_line_error(err)


@pytest.mark.parametrize("text", ["kl_mean", "kl_mean=x", "kl_men=1"])
def test_a_limit_that_makes_no_sense_is_refused(capsys, tiny_artifact, text):
    code, _, err = call(capsys, "validate", tiny_artifact, "--reference", "x", "--limit", text)
    assert code == 2
    assert "kl_me" in one_line_error(err)


def test_bench_measures_every_number_with_its_unit(capsys, tiny_artifact):
    code, out, err = call(
        capsys, "bench", tiny_artifact, "--prompt-tokens", 8, "--new-tokens", 8, "--rounds", 2, "--threads", 1, "--json"
    )
    assert code == 0, err
    data = json.loads(out)
    for key in (
        "load_ms",
        "ttft_cold_ms",
        "ttft_warm_ms",
        "inter_token_p50_ms",
        "inter_token_p99_ms",
        "decode_tokens_per_second",
        "peak_rss_bytes",
    ):
        assert data[key] > 0, key
    assert data["inter_token_p50_ms"] <= data["inter_token_p90_ms"] <= data["inter_token_p99_ms"]
    assert len(data["decode_tokens_per_second_rounds"]) == 2
    code, out, _ = call(capsys, "bench", tiny_artifact, "--prompt-tokens", 8, "--new-tokens", 8, "--rounds", 1, "-q")
    assert code == 0
    assert "tokens/s" in out


def test_inspect_shows_an_artifacts_graph_and_a_checkpoints_tensors(capsys, tiny_artifact, tiny_checkpoint):
    code, out, err = call(capsys, "inspect", tiny_artifact, "--json", "--digests")
    assert code == 0, err
    data = json.loads(out)
    graph = data["graphs"]["model.onnx"]
    assert {"input_ids", "attention_mask", "past_key_values.0.key"} <= {entry["name"] for entry in graph["inputs"]}
    assert graph["operators"]["com.microsoft.GroupQueryAttention"] == data["model"]["num_layers"]
    code, out, _ = call(capsys, "inspect", tiny_artifact)
    assert code == 0
    assert "past_key_values.{i}.key" in out
    code, out, _ = call(capsys, "inspect", tiny_checkpoint, "--json")
    assert code == 0
    assert json.loads(out)["tensors"]["count"] > 10


def test_inspect_refuses_what_it_does_not_know(capsys, tmp_path):
    (tmp_path / "x.txt").write_text("x")
    code, _, err = call(capsys, "inspect", tmp_path / "x.txt")
    assert code == 3
    assert "not a file optkit knows" in one_line_error(err)
    code, _, err = call(capsys, "inspect", tmp_path)
    assert code == 3
    assert "neither" in one_line_error(err)


def test_doctor_lists_versions_abilities_and_remedies(capsys):
    code, out, _ = call(capsys, "doctor", "--json")
    assert code == 0
    data = json.loads(out)
    assert data["optkit"] == optkit.__version__
    assert all(entry["why"] for entry in data["can"] if entry["can"] == "no")
    code, out, _ = call(capsys, "doctor")
    assert code == 0
    assert "onnxruntime" in out


def test_the_tested_versions_are_those_of_the_constraints_file():
    from optkit.doctor import LIBRARIES

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {
        name.lower().replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines if "==" in line)
    }
    assert {name: tested for name, (tested, _, _) in LIBRARIES.items()} == {name: pinned[name] for name in LIBRARIES}


def test_json_and_progress_do_not_mix_in_a_real_process(tiny_artifact):
    done = process("bench", tiny_artifact, "--prompt-tokens", 4, "--new-tokens", 4, "--rounds", 1, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["new_tokens"] == 4
    assert "measuring" in done.stderr


# ── options and recipes ──────────────────────────────────────────────────────────────────────────────────────────────


def test_options_win_over_the_recipe_and_what_is_not_given_stays():
    base = ExportRecipe(target="onnx", max_seq_len=64)
    assert merge(ExportRecipe, base, {"max_seq_len": 32, "dtype": None}, "export") == ExportRecipe(
        target="onnx", max_seq_len=32
    )


def test_an_option_is_checked_as_a_recipe_would_be():
    with pytest.raises(RecipeError, match="did you mean"):
        merge(ExportRecipe, None, {"max_seq_length": 3}, "export")


@pytest.mark.parametrize(("text", "size"), [("64", 64), ("channel", None)])
def test_a_group_size_is_a_number_or_channel(text, size):
    assert quantize_section(None, {"group_size": text}).weights().group_size == size
    with pytest.raises(UsageError, match="a number"):
        quantize_section(None, {"group_size": "many"})


def test_calibration_options_go_to_their_section():
    section = quantize_section(None, {"calibration": "self", "calibration_samples": 3, "seed": 7, "method": "gptq"})
    assert (section.calibration.source, section.calibration.samples, section.calibration.seed) == ("self", 3, 7)


def test_quantize_with_a_recipe_that_does_not_quantize_is_refused():
    with pytest.raises(RecipeError, match="no quantize section"):
        quantize_section(Recipe(model="m"), {})


def test_doctor_names_driver_gpu_and_whose_plans_run(monkeypatch):
    from optkit import cuda, doctor

    driver = cuda.Driver("13.0", (cuda.Device("Some GPU", "8.9", 24 << 30),))
    monkeypatch.setattr(cuda, "_ask", lambda: driver)
    monkeypatch.setattr(doctor, "installed_version", lambda name: "1.7.1" if name == "tensorrt_rtx_cu13" else None)
    found = doctor.examine()["tensorrt"]
    assert found["driver"] == "CUDA 13.0"
    assert "Some GPU, compute capability 8.9" in found["gpus"][0]
    assert found["runs_plans_of"] == ["tensorrt_rtx"]
    monkeypatch.setattr(cuda, "_ask", lambda: "no NVIDIA driver is installed")
    assert doctor.examine()["tensorrt"]["runs_plans_of"] == []
