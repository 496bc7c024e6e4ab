"""The peers' environments and models, made once under ``benchmarks/.peers``.

Each peer has a virtual environment of its own with pinned packages, so that no peer's version of a shared library (ONNX
Runtime, torch) is another's. All models come from the same FP16 directory, by each peer's own tool:

* genai: ``onnxruntime_genai.models.builder -p int4 -e cpu`` (its default: groups of 32, symmetric, fp32 head);
* llama_cpp_q4_1: the GGUF file as it is; llama_cpp_q4_0: requantized from it by llama.cpp's quantizer (the speed of a format
  does not depend on the values);
* openvino: ``optimum-cli export openvino --weight-format int4 --sym --group-size 64 --ratio 1.0`` (128 does not divide 576);
* transformers, transformers_ort: the FP16 directory in torch fp32, and its graph by transformers' ONNX exporter.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PEERS = ROOT / "benchmarks" / ".peers"
SOURCE = PEERS / "source"
TORCH_INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")


@dataclass(frozen=True)
class Environment:
    """A virtual environment: its name under ``.peers``, pinned packages, an extra index, and what is removed again."""

    name: str
    packages: tuple[str, ...]
    index: str | None = None
    unwanted: tuple[str, ...] = ()

    @property
    def python(self) -> Path:
        return PEERS / self.name / "bin" / "python"

    def make(self) -> None:
        """Installs the packages; a no-op when exactly these are there."""
        marker = PEERS / self.name / ".installed"
        wanted = "\n".join(self.packages)
        if marker.is_file() and marker.read_text() == wanted:
            return
        _say(f"making {PEERS / self.name}: {', '.join(self.packages)}")
        venv.create(PEERS / self.name, with_pip=True, clear=True)
        extra = ["--extra-index-url", self.index] if self.index else []
        _logged(
            [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", *extra, *self.packages],
            PEERS / f"{self.name}-install.log",
        )
        if self.unwanted:
            subprocess.run([str(self.python), "-m", "pip", "uninstall", "-q", "-y", *self.unwanted], check=True)
        marker.write_text(wanted)

    def versions(self) -> dict[str, str]:
        """Of the pinned packages and of what matters beneath them."""
        names = [p.partition("==")[0] for p in self.packages] + ["onnxruntime", "openvino"]
        code = (
            "import importlib.metadata as m, json\n"
            "def v(n):\n try: return m.version(n)\n except m.PackageNotFoundError: return None\n"
            f"print(json.dumps({{n: v(n) for n in {names!r} if v(n)}}))"
        )
        done = subprocess.run([str(self.python), "-c", code], check=True, capture_output=True, text=True)
        found: dict[str, str] = json.loads(done.stdout)
        return found


GENAI = Environment("genai", ("onnxruntime-genai==0.18.0",))
LLAMA_CPP = Environment("llama_cpp", ("llama-cpp-python==0.3.36", "numpy==2.4.6"))
OPENVINO = Environment(
    "openvino",
    (
        "torch==2.13.0+cpu",
        "openvino-genai==2026.4.1.0",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
        "transformers==5.5.4",
    ),
    TORCH_INDEX,
    ("torchvision",),  # required by optimum-intel, built for another torch on some indexes, not used for text
)
TRANSFORMERS = Environment(
    "transformers",
    ("torch==2.13.0+cpu", "transformers==5.24.0", "onnx==1.23.2", "onnxscript==0.7.2", "onnxruntime==1.32.0"),
    TORCH_INDEX,
)


def make_source(model: Path) -> Path:
    """The FP16 directory every peer's model is made from, in the spelling older transformers read as well."""
    from optkit.checkpoint import files
    from optkit.checkpoint.model import open_checkpoint

    marker = SOURCE / ".made-from"
    if not (marker.is_file() and marker.read_text() == str(model)):
        shutil.rmtree(SOURCE, ignore_errors=True)
        shutil.copytree(open_checkpoint(model).directory, SOURCE)
        config = files.portable_config(files.read_json(SOURCE / "config.json"))
        (SOURCE / "config.json").write_text(json.dumps(config, indent=1))
        marker.write_text(str(model))
    return SOURCE


def make_genai(source: Path, threads: int) -> Path:
    """Its builder needs torch, transformers and onnx_ir, lent from this environment behind the peer's own packages."""
    target = PEERS / "genai-model"
    if not (target / "genai_config.json").is_file():
        _say("genai: building its int4 model")
        lent = [path for path in sys.path if path.endswith("site-packages")]
        code = (
            f"import sys, runpy; sys.path.extend({lent!r}); "
            f"sys.argv = ['builder', '-i', {str(source)!r}, '-o', {str(target)!r}, "
            f"'-p', 'int4', '-e', 'cpu', '-c', {str(PEERS / 'genai-cache')!r}]; "
            "runpy.run_module('onnxruntime_genai.models.builder', run_name='__main__')"
        )
        _logged([str(GENAI.python), "-c", code], PEERS / "genai-model.log")
    path = target / "genai_config.json"
    config = json.loads(path.read_text())
    config["model"]["decoder"].setdefault("session_options", {})["intra_op_num_threads"] = threads
    path.write_text(json.dumps(config, indent=1))
    return target


def make_q4_0(gguf: Path) -> Path:
    target = PEERS / f"{gguf.name.removesuffix('.gguf').removesuffix('.Q4_1')}.Q4_0.gguf"
    if not target.is_file():
        _say("llama_cpp: requantizing to Q4_0")
        code = (
            "import sys, llama_cpp as l\n"
            "p = l.llama_model_quantize_default_params()\n"
            "p.ftype, p.allow_requantize, p.nthread = l.LLAMA_FTYPE_MOSTLY_Q4_0, True, 1\n"
            "sys.exit(l.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))"
        )
        _logged([str(LLAMA_CPP.python), "-c", code, str(gguf), str(target)], PEERS / "llama_cpp-model.log", target)
    return target


def make_openvino(source: Path) -> Path:
    target = PEERS / "openvino-model"
    if not (target / "openvino_model.xml").is_file():
        _say("openvino: converting to int4")
        tool = str(OPENVINO.python.parent / "optimum-cli")
        task, form = ("--task", "text-generation-with-past"), ("--weight-format", "int4", "--sym", "--group-size", "64")
        _logged(
            [tool, "export", "openvino", "-m", str(source), *task, *form, "--ratio", "1.0", str(target)],
            PEERS / "openvino-model.log",
            target,
        )
    return target


def make_transformers_ort(source: Path) -> Path:
    target = PEERS / "transformers-ort-model"
    if not target.is_dir():
        _say("transformers_ort: exporting with transformers' ONNX exporter")
        script = Path(__file__).with_name("transformers_export.py")
        command = [str(TRANSFORMERS.python), str(script), str(source), str(target)]
        _logged(command, PEERS / "transformers-ort-model.log", target)
    return target


def _logged(command: list[str], log: Path, target: Path | None = None) -> None:
    """Runs it offline-safe into a log; what it left half written is removed when it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as sink:
        done = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        if target is not None:
            shutil.rmtree(target, ignore_errors=True)
            target.unlink(missing_ok=True) if target.is_file() else None
        raise PeerFailedError(f"{command[0]} failed with exit code {done.returncode}, see {log}")


class PeerFailedError(Exception):
    """A peer's environment or model could not be made; the comparison goes on without it and says so."""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
