"""``optkit.json``: a directory with one is complete, and what is damaged is said to be."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from optkit import manifest
from optkit.errors import ArtifactError, StorageError, UsageError
from optkit.manifest import Manifest, ModelSpec, check_files, read_manifest, staged_directory, write_manifest

SPEC = ModelSpec("llama", 2, 64, 128, 4, 2, 32, 256, eos_token_ids=(2, 5))


def some_manifest(kind="artifact"):
    return Manifest(kind, {"digest": "d", "spec": "m"}, {"target": "ort"}, {"numpy": "1"}, SPEC, {"target": "ort"})


def make(path: Path, files=(("a.bin", b"abc"),), kind="artifact"):
    with staged_directory(path) as staging:
        for name, content in files:
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).write_bytes(content)
        write_manifest(staging, some_manifest(kind))
    return path


def test_what_is_written_reads_back_with_sizes_and_digests(tmp_path):
    out = make(tmp_path / "out", [("a.bin", b"abc"), ("sub/b.txt", b"")])
    read = read_manifest(out, kind="artifact")
    assert read.model == SPEC
    assert read.files["a.bin"] == {"bytes": 3, "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}
    assert set(read.files) == {"a.bin", "sub/b.txt"}
    check_files(out, read, digests=True)


def test_an_error_inside_leaves_nothing_behind(tmp_path):
    def stage():
        with staged_directory(tmp_path / "out") as staging:
            (staging / "half").write_bytes(b"x")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError):
        stage()
    assert list(tmp_path.iterdir()) == []


def test_an_old_result_survives_a_failed_new_one(tmp_path):
    out = make(tmp_path / "out")
    with pytest.raises(RuntimeError), staged_directory(out):
        raise RuntimeError("boom")
    check_files(out, read_manifest(out), digests=True)


def test_a_result_is_replaced_whole(tmp_path):
    out = make(tmp_path / "out", [("old", b"1")])
    make(out, [("new", b"2")])
    assert sorted(p.name for p in out.iterdir()) == ["new", "optkit.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_somebody_elses_files_are_never_replaced(tmp_path):
    out = tmp_path / "home"
    out.mkdir()
    (out / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="is not empty and not an optkit directory"), staged_directory(out):
        pass
    assert (out / "thesis.tex").read_text() == "x"


def test_a_file_in_the_way_is_a_usage_error(tmp_path):
    (tmp_path / "out").write_text("x")
    with pytest.raises(UsageError, match="is a file"), staged_directory(tmp_path / "out"):
        pass


def test_a_full_disk_is_one_storage_error_and_no_directory(tmp_path):
    import errno

    with pytest.raises(StorageError, match="no space left"), staged_directory(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys, time
from optkit.manifest import staged_directory
with staged_directory(sys.argv[1]) as staging:
    (staging / "half").write_bytes(b"x" * 1000)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_killed_run_leaves_nothing_that_looks_complete_and_the_next_run_tidies_up(tmp_path):
    out = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(out)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().strip() == "ready"
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = list(tmp_path.iterdir())
    assert len(left) == 1
    assert left[0].name.startswith(".out.tmp-")
    assert not (left[0] / manifest.FILE_NAME).exists()
    make(out)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_running_neighbours_staging_is_left_alone(tmp_path):
    alive = tmp_path / f".out.tmp-{os.getpid()}-abc"
    alive.mkdir()
    make(tmp_path / "out")
    assert alive.is_dir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda out: (out / "a.bin").unlink(), "a.bin: missing, though optkit.json lists it"),
        (lambda out: (out / "a.bin").write_bytes(b"ab"), "2 bytes, and optkit.json says 3: truncated or replaced"),
        (lambda out: (out / "a.bin").write_bytes(b"abd"), "its content is not what optkit.json recorded"),
    ],
)
def test_missing_truncated_and_changed_files_are_told_apart(tmp_path, damage, message):
    out = make(tmp_path / "out")
    damage(out)
    with pytest.raises(ArtifactError, match=message):
        check_files(out, read_manifest(out), digests=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:50], "damaged"),
        (lambda text: json.dumps({**json.loads(text), "format_version": 99}), "format 99 is newer than this optkit"),
        (lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "facts"}), "damaged"),
        (lambda text: "[]", "damaged"),
    ],
)
def test_a_damaged_or_newer_manifest_is_one_clear_error(tmp_path, change, message):
    out = make(tmp_path / "out")
    path = out / "optkit.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(ArtifactError, match=message) as caught:
        read_manifest(out)
    assert "\n" not in str(caught.value)


def test_the_wrong_kind_of_directory_is_named(tmp_path):
    out = make(tmp_path / "out", kind="build")
    with pytest.raises(ArtifactError, match="holds a build, and what is needed here is: artifact"):
        read_manifest(out, kind="artifact")
    with pytest.raises(ArtifactError, match="no such directory"):
        read_manifest(tmp_path / "none")
    (tmp_path / "plain").mkdir()
    with pytest.raises(ArtifactError, match="not a complete optkit directory"):
        read_manifest(tmp_path / "plain")


def test_digests_follow_content_and_names_and_nothing_else(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(b"1")
    os.utime(tmp_path / "two" / "x", (time.time() - 9999, time.time() - 9999))
    digests = [manifest.tree_digest([tmp_path / n / "x"], tmp_path / n) for n in ("one", "two")]
    assert digests[0] == digests[1]
    (tmp_path / "two" / "x").rename(tmp_path / "two" / "y")
    assert manifest.tree_digest([tmp_path / "two" / "y"], tmp_path / "two") != digests[0]


def test_files_are_readable_by_others_whatever_the_library_that_wrote_them(tmp_path):
    """safetensors writes 0600; a service under another user must read the artifact."""
    out = tmp_path / "out"
    with manifest.staged_directory(out) as staging:
        (staging / "private").write_text("x")
        (staging / "private").chmod(0o600)
        (staging / manifest.FILE_NAME).write_text("{}")
    assert (out / "private").stat().st_mode & 0o777 == (out / manifest.FILE_NAME).stat().st_mode & 0o777
