"""``optimum-cli export optkit`` as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import optkit
from optkit.manifest import read_manifest

OPTIMUM = Path(sys.executable).with_name("optimum-cli")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(OPTIMUM), "export", "optkit", *arguments], capture_output=True, text=True, check=False, env=os.environ
    )


def test_exports_and_quantizes_through_optimum(tiny_checkpoint, tmp_path):
    out = tmp_path / "out"
    done = run("-m", str(tiny_checkpoint), "--scheme", "w4a16", "--group-size", "32", "--target", "ort", str(out))
    assert done.returncode == 0, done.stderr
    assert read_manifest(out, "artifact").facts["target"] == "ort"
    with optkit.open_session(out, threads=1) as session:
        assert len(session.generate([[5, 6, 7]], max_new_tokens=3).sequences[0].tokens) == 3


def test_errors_are_one_line_with_the_exit_code(tmp_path):
    done = run("-m", str(tmp_path / "nowhere"), str(tmp_path / "out"))
    assert done.returncode == 3
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr
