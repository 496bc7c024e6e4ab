"""The stage as a whole: nothing half-written, no size limit, weights never all in memory."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap

import onnx
import pytest
import torch
from google.protobuf import message

import optkit
from optkit.errors import CheckpointError, StorageError, VerificationError
from optkit.export.lower import finish
from optkit.manifest import check_files, read_manifest


def test_files_have_the_digests_the_manifest_lists(artifact_of):
    artifact = artifact_of("llama")
    check_files(artifact, read_manifest(artifact, "artifact"), digests=True)
    assert {"model.onnx", "model.onnx.data", "tokenizer.json", "config.json"} <= set(read_manifest(artifact).files)


def test_two_exports_of_one_checkpoint_are_the_same_bytes(checkpoint_of, artifact_of, tmp_path):
    again = optkit.export(checkpoint_of("llama"), None, tmp_path / "again")
    assert read_manifest(again).files == read_manifest(artifact_of("llama")).files


def test_a_killed_export_leaves_nothing_that_looks_complete_and_a_rerun_works(checkpoint_of, tmp_path):
    out = tmp_path / "out"
    script = textwrap.dedent(f"""
        import os, signal, optkit
        def progress(step, done, total):
            if "verify" in step:
                os.kill(os.getpid(), signal.SIGKILL)
        optkit.export({str(checkpoint_of("llama"))!r}, None, {str(out)!r}, progress)
    """)
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=os.getcwd(), check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    assert [p.name.startswith(".out.tmp-") for p in tmp_path.iterdir()] == [True]
    optkit.export(checkpoint_of("llama"), None, out)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(checkpoint_of, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(finish, "save", full)
    with pytest.raises(StorageError, match="no space left"):
        optkit.export(checkpoint_of("llama"), None, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_verification_leaves_the_old_artifact_in_place(checkpoint_of, tmp_path, monkeypatch):
    out = optkit.export(checkpoint_of("llama"), None, tmp_path / "out")
    before = (out / "optkit.json").read_bytes()

    def refuse(*arguments, **options):
        raise VerificationError("no")

    monkeypatch.setattr("optkit.export.graph.verify_onnx", refuse)
    with pytest.raises(VerificationError):
        optkit.export(checkpoint_of("llama"), None, out)
    assert (out / "optkit.json").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_weights_never_pass_through_protobuf(checkpoint_of, tmp_path, monkeypatch):
    """transformers.js#967, optimum#300: models above protobuf's 2 GB. The limit here is 160 KB; the weights are 370 KB."""
    limit = 160_000
    original = onnx.ModelProto.SerializeToString

    def limited(self, *arguments, **options):
        if self.ByteSize() > limit:
            raise message.EncodeError(f"more than {limit} bytes")
        return original(self, *arguments, **options)

    monkeypatch.setattr(onnx.ModelProto, "SerializeToString", limited, raising=False)
    monkeypatch.setattr(onnx.checker, "MAXIMUM_PROTOBUF", limit)
    out = optkit.export(checkpoint_of("llama"), None, tmp_path / "out")
    assert (out / "model.onnx").stat().st_size < limit < (out / "model.onnx.data").stat().st_size


def test_weights_are_read_one_at_a_time(checkpoint_of, tmp_path, monkeypatch):
    """While the file is written no two weights are alive: each read starts after the tensor before it is gone."""
    import gc
    import weakref

    from optkit.checkpoint.model import Checkpoint

    alive: list[weakref.ref] = []
    most = [0]
    writing = [False]
    original = Checkpoint.tensor_for

    def watched(self, name, dtype=torch.float32):
        read = original(self, name, dtype)

        def reader():
            if writing[0]:
                gc.collect()
                alive[:] = [r for r in alive if r() is not None]
                most[0] = max(most[0], len(alive))
            tensor = read()
            if writing[0]:
                alive.append(weakref.ref(tensor))
            return tensor

        return reader

    saved = finish.save

    def save(*arguments):
        writing[0] = True
        saved(*arguments)
        writing[0] = False

    monkeypatch.setattr(Checkpoint, "tensor_for", watched)
    monkeypatch.setattr(finish, "save", save)
    optkit.export(checkpoint_of("llama"), None, tmp_path / "out")
    # packed siblings (q, k, v) are concatenated, so at most the other two are alive when the third is read
    assert most[0] <= 2


def test_missing_and_damaged_checkpoints_are_named(checkpoint_of, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        optkit.export(tmp_path / "nowhere", None, tmp_path / "out")
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(checkpoint_of("llama"), broken)
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        optkit.export(broken, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_onnxruntime_genai_is_told_the_names_and_sizes(artifact_of):
    artifact = artifact_of("qwen3")
    config = json.loads((artifact / "genai_config.json").read_text())
    decoder = config["model"]["decoder"]
    assert decoder["head_size"] == 32
    assert decoder["num_key_value_heads"] == 2
    graph = onnx.load(artifact / decoder["filename"], load_external_data=False).graph
    assert [d.dim_value for d in graph.output[0].type.tensor_type.shape.dim][1] == 1
    names = {value.name for value in graph.input}
    for layer in range(decoder["num_hidden_layers"]):
        assert decoder["inputs"]["past_key_names"] % layer in names
    assert "logits_positions" not in names


@pytest.mark.parametrize(("dtype", "budget", "tolerance"), [("fp32", 50_000, 1e-5), ("fp16", 12_000, 2e-2)])
def test_a_graph_run_in_pieces_answers_like_the_whole(artifact_of, dtype, budget, tolerance):
    """Large models are verified piece by piece; here a tiny one, cut into at least five. In float16 some products are larger
    than a piece and are computed column by column."""
    import numpy as np

    from optkit.export.segments import SegmentedSession
    from optkit.export.verify import Runner, open_exact
    from optkit.io_spec import GraphSpec

    artifact = artifact_of("llama", dtype=dtype)
    spec = GraphSpec.from_dict(read_manifest(artifact).facts["graph"])
    pieces = SegmentedSession(onnx.load(artifact / "model.onnx", load_external_data=False), artifact, budget=budget)
    assert len(pieces.segments) >= 5
    assert any(pieces._is_large_product(s) for s in pieces.segments) == (dtype == "fp16")
    whole = open_exact(artifact / "model.onnx")
    runs = [Runner(session, spec, 2, 16) for session in (whole, pieces)]
    for rows in ([[5, 9, 11], [7, 3, 4]], [[8], [6]]):
        want, got = (run.step(rows) for run in runs)
        np.testing.assert_allclose(got, want, atol=tolerance)
