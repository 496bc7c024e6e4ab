"""Opening: which backend, what is missing, and what must not be needed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from optkit.errors import ArtifactError, CheckpointError, DependencyError, UsageError
from optkit.runtime.session import open_session

REPOSITORY = Path(__file__).parents[2]


def run_python(code: str, *blocked: str) -> subprocess.CompletedProcess[str]:
    """``code`` in a fresh interpreter in which importing the ``blocked`` packages fails as if they were not installed."""
    block = f"""
        import sys
        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {set(blocked)!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.partition(".")[0])
        sys.meta_path.insert(0, Block())
    """
    script = textwrap.dedent(block) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


def test_the_manifest_decides_the_backend(checkpoint: Callable[..., Path], artifact: Callable[..., Path]) -> None:
    with open_session(artifact("llama")) as session:
        assert session.backend == "ort"
        assert session.spec.vocab_size == 128
        assert session.tokenizer.bos_token_id == 1
    with open_session(str(checkpoint("llama"))) as session:
        assert session.backend == "torch"


def test_an_artifact_runs_without_torch_and_transformers(artifact: Callable[..., Path]) -> None:
    code = f"""
        import optkit.runtime
        from optkit import open_session
        with open_session({str(artifact("llama"))!r}, threads=1) as session:
            result = session.generate("then he", max_new_tokens=4, ignore_eos=True)
        assert len(result.tokens[0]) == 4
        assert not {{"torch", "transformers", "onnx"}} & set(sys.modules)
        print("ran", result.stats.new_tokens)
    """
    done = run_python(code, "torch", "transformers", "onnx", "safetensors", "compressed_tensors")
    assert done.stdout.strip() == "ran 4", done.stderr


@pytest.mark.parametrize(
    ("package", "extra", "kind"), [("onnxruntime", "cpu", "artifact"), ("torch", "quantize", "checkpoint")]
)
def test_a_missing_engine_is_named_with_what_to_install(
    checkpoint: Callable[..., Path], artifact: Callable[..., Path], package: str, extra: str, kind: str
) -> None:
    path = artifact("llama") if kind == "artifact" else checkpoint("llama")
    code = f"""
        from optkit.errors import DependencyError
        from optkit.runtime.session import open_session
        try:
            open_session({str(path)!r})
        except DependencyError as error:
            print(error, error.exit_code)
    """
    done = run_python(code, package)
    assert f"needs {package}, which is not installed: pip install 'optkit[{extra}]' 8" in done.stdout, done.stderr
    assert issubclass(DependencyError, Exception)


def test_wrong_backends_and_options_are_named_with_the_nearest(
    checkpoint: Callable[..., Path], artifact: Callable[..., Path]
) -> None:
    with pytest.raises(UsageError, match=r"backend 'onnxruntime': there is ort, trt, torch"):
        open_session(artifact("llama"), backend="onnxruntime")
    with pytest.raises(UsageError, match=r"no option 'memory_limits' .*'memory_limit'"):
        open_session(artifact("llama"), memory_limits=1)
    with pytest.raises(UsageError, match=r"no option 'dtype' for backend 'ort'"):
        open_session(artifact("llama"), dtype="fp16")
    with pytest.raises(UsageError, match="dtype 'fp31'"):
        open_session(checkpoint("llama"), dtype="fp31")
    with pytest.raises(UsageError, match="threads"):
        open_session(artifact("llama"), threads=0)
    with pytest.raises(UsageError, match="max_batch"):
        open_session(artifact("llama"), max_batch=0)


def test_what_is_not_there_or_not_complete_is_one_clear_line(tmp_path: Path, artifact: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        open_session(tmp_path / "nowhere")
    with pytest.raises(ArtifactError):
        open_session(tmp_path, backend="ort")

    def damaged(name: str) -> Path:
        return Path(shutil.copytree(artifact("llama"), tmp_path / name))

    short = damaged("short")
    weights = next(short.glob("*.data"))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match=r"\.data: \d+ bytes, and optkit\.json says"):
        open_session(short)
    gone = damaged("gone")
    (gone / "model.onnx").unlink()
    with pytest.raises(ArtifactError, match=r"model\.onnx: missing"):
        open_session(gone)
    later = damaged("later")
    manifest = json.loads((later / "optkit.json").read_text())
    manifest["facts"]["target"] = "abacus"
    (later / "optkit.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="target 'abacus'"):
        open_session(later)


def test_warmup_leaves_nothing_behind(artifact: Callable[..., Path]) -> None:
    with open_session(artifact("llama"), threads=1) as session:
        session.warmup()
        assert session.batch == 0
