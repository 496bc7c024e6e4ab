"""ONNX graph -> TensorRT engine, with a sidecar that says what it is.

One builder for two flavours of the library's public Python API:

``tensorrt_rtx``  TensorRT-RTX. Compiles without a GPU and without a driver, for a list of compute capabilities
                  (7.5 to 12.1, no 9.0). This is the flavour that is built in continuous integration.
``tensorrt``      Standard TensorRT. Times kernels on the GPU of the machine, so it needs one, and the plan is for that GPU.

The order is: lint the graph, preflight the capabilities, check the driver if the flavour needs one, then parse and build in
a child process (:mod:`optkit.export.engine_worker`) under a time-out and a memory limit, then write plan, timing cache and
sidecar under temporary names and rename them, the sidecar last. Whatever goes wrong, nothing half-written is left.

Two builds of one graph differ byte for byte, with or without a timing cache (NVIDIA/TensorRT#4730, #3316, #4798, #568), so
a recipe's digest says nothing about a plan: every plan is identified by its own digest and validated by itself. Standard
TensorRT's timing cache is kept beside the plan with its digest, and ``fail_on_timing_cache_miss`` turns an unpinned timing
into an error. TensorRT-RTX times nothing while it builds (its timing cache calls are documented no-ops), so it has none.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

import optkit
from optkit import cuda
from optkit.errors import (
    DependencyError,
    EngineError,
    LimitError,
    UnsupportedError,
    UsageError,
    VerificationError,
    storage_errors,
)
from optkit.export.lint import Finding, lint, raise_errors
from optkit.export.profiles import RTX_DEFAULT_CAPABILITIES, Profile, parse_capabilities
from optkit.manifest import file_digest
from optkit.sidecar import FLAVOURS, Sidecar, TensorInfo, installed_version, onnx_digest, sidecar_path, write_sidecar
from optkit.sidecar import check_sidecar as check_sidecar

Progress = Callable[[str, int, int], None]
WORKER = "optkit.export.engine_worker"
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is built.

    Attributes:
        flavour: ``tensorrt_rtx`` or ``tensorrt``.
        compute_capabilities: for ``tensorrt_rtx``: what to compile for. More of them make the plan larger and the build longer.
        timeout_s: the build is killed after so many seconds.
        memory_limit_bytes: the build is killed when its process holds more than this; ``None`` does not limit it.
        workspace_bytes: device memory a kernel may use as scratch; ``None`` leaves the library's default.
        optimization_level: 0 (fastest build) to 5; ``None`` leaves the library's default.
        decompose_attention: let attention layers without a dedicated kernel be built from separate kernels.
        timing_cache: (``tensorrt`` only) a cache to start from; the resulting one is written beside the plan.
        fail_on_timing_cache_miss: (``tensorrt`` only) refuse to time a kernel that is not in the cache.
    """

    flavour: str = "tensorrt_rtx"
    compute_capabilities: tuple[str, ...] = RTX_DEFAULT_CAPABILITIES
    timeout_s: float = 1800.0
    memory_limit_bytes: int | None = None
    workspace_bytes: int | None = None
    optimization_level: int | None = None
    decompose_attention: bool = True
    timing_cache: str | None = None
    fail_on_timing_cache_miss: bool = False

    def __post_init__(self) -> None:
        if self.flavour not in FLAVOURS:
            raise UsageError(f"engine flavour {self.flavour!r}: one of {', '.join(FLAVOURS)}")
        if self.timeout_s <= 0:
            raise UsageError(f"timeout_s {self.timeout_s}: more than 0 seconds")
        if self.optimization_level is not None and not 0 <= self.optimization_level <= 5:
            raise UsageError(f"optimization_level {self.optimization_level}: from 0 (fastest build) to 5")
        if self.flavour == "tensorrt_rtx":
            if self.timing_cache is not None or self.fail_on_timing_cache_miss:
                raise UsageError(
                    "timing_cache: TensorRT-RTX times nothing while it builds; leave it out (flavour tensorrt has one)"
                )
            object.__setattr__(self, "compute_capabilities", parse_capabilities(self.compute_capabilities, self.flavour))


@dataclass(frozen=True)
class EngineReport:
    """What a build gave: the files, its cost, and what the lint had to note."""

    plan: Path
    sidecar: Sidecar
    timing_cache: Path | None
    plan_bytes: int
    build_seconds: float
    total_seconds: float
    peak_rss_bytes: int
    notes: tuple[Finding, ...]
    messages: tuple[str, ...]


def build_engine(
    onnx_path: str | Path,
    plan_path: str | Path,
    profiles: Sequence[Profile],
    options: EngineOptions | None = None,
    progress: Progress | None = None,
) -> EngineReport:
    """Builds ``plan_path`` and ``<plan>.json`` (and ``<plan>.timing``, flavour ``tensorrt``) from an ONNX file.

    Args:
        onnx_path: the graph; external weights beside it.
        plan_path: the engine file to write; an existing plan is replaced when the new one is complete.
        profiles: in the order the plan will have them (:func:`optkit.export.profiles.solve_profiles`).
        options: see :class:`EngineOptions`.
        progress: called with (phase, step, steps) while the library works.

    Raises:
        UnsupportedError: the lint or the parser refuses the graph (names the nodes), or the flavour cannot run here.
        VerificationError: the parser dropped an input.
        LimitError: the time-out or the memory limit was reached.
        DependencyError: the library is not installed. EngineError: the builder failed; with its own words.
        StorageError: disk full or not writable.
    """
    options = options or EngineOptions()
    onnx_path, plan_path = Path(onnx_path), Path(plan_path)
    check_machine(options.flavour)
    model = ir.load(onnx_path) if onnx_path.is_file() else onnx_path
    capabilities = _target_capabilities(options)
    findings = lint(model, options.flavour, capabilities, options.decompose_attention)
    raise_errors(findings, str(onnx_path))
    external = external_files(model) if isinstance(model, ir.Model) else []
    started = time.monotonic()
    with storage_errors(plan_path):
        plan_path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{plan_path.name}.tmp-{os.getpid()}-", dir=plan_path.parent) as staging:
            job = make_job(onnx_path, Path(staging), profiles, options)
            result = run_worker(job, options, Path(staging), progress)
            sidecar = _describe(onnx_path, external, plan_path, Path(staging), profiles, options, result)
            _publish(Path(staging), plan_path, sidecar)
    cache = Path(f"{plan_path}.timing")
    return EngineReport(
        plan=plan_path,
        sidecar=sidecar,
        timing_cache=cache if sidecar.timing_cache else None,
        plan_bytes=int(sidecar.plan["bytes"]),
        build_seconds=result["build_seconds"],
        total_seconds=round(time.monotonic() - started, 3),
        peak_rss_bytes=result["peak_rss_bytes"],
        notes=tuple(findings),
        messages=tuple(result["messages"]),
    )


def check_machine(flavour: str) -> None:
    """Raises if an engine of ``flavour`` cannot be built on this machine; imports no engine library.

    Raises:
        DependencyError: the library is not installed. UnsupportedError: it needs a driver and there is none.
    """
    if flavour == "tensorrt":
        why = cuda.why_no_driver()
        if why:  # creating its Builder now would end the process
            raise UnsupportedError(
                f"standard TensorRT builds on the GPU it is for, and {why}; build there (optkit export --build-only DIR), "
                "or use TensorRT-RTX, which builds without a GPU (pip install 'optkit[trt-rtx]')"
            )
    installed_version(flavour)


def external_files(model: ir.Model) -> list[str]:
    """Names of the external weight files of a model, relative to it, in name order."""
    return sorted(
        {str(v.const_value.location) for v in model.graph.initializers.values() if isinstance(v.const_value, ir.ExternalTensor)}
    )


def _target_capabilities(options: EngineOptions) -> tuple[str, ...]:
    if options.flavour == "tensorrt_rtx":
        return options.compute_capabilities
    driver = cuda.find_driver()
    return (driver.devices[0].capability,) if driver else ()


def make_job(onnx_path: Path, staging: Path | None, profiles: Sequence[Profile], options: EngineOptions) -> dict[str, Any]:
    """What the worker is told. Without ``staging`` it parses and checks, and builds nothing."""
    rtx = options.flavour == "tensorrt_rtx"
    return {
        "flavour": options.flavour,
        "onnx": str(onnx_path),
        "plan": str(staging / "plan") if staging else "",
        "timing_cache_in": options.timing_cache,
        "timing_cache_out": str(staging / "timing") if staging else "",
        "profiles": [{"name": p.name, "shapes": {k: [list(s) for s in v] for k, v in p.shapes.items()}} for p in profiles],
        "compute_capabilities": list(options.compute_capabilities) if rtx else [],
        "workspace_bytes": options.workspace_bytes,
        "optimization_level": options.optimization_level,
        "decompose_attention": options.decompose_attention,
        "fail_on_timing_cache_miss": options.fail_on_timing_cache_miss,
    }


# ---------------------------------------------------------------- the child process


def run_worker(job: Mapping[str, Any], options: EngineOptions, staging: Path, progress: Progress | None) -> dict[str, Any]:
    """Runs the job in a child process and returns its result; the child never outlives this call."""
    job_file = staging / "job.json"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    root = str(Path(optkit.__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    with open(staging / "stderr", "w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", WORKER, str(job_file)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        answers: list[dict[str, Any]] = []
        reader = threading.Thread(target=_read_lines, args=(child, answers, progress), daemon=True)
        reader.start()
        try:
            stopped = _watch(child, options)
        finally:
            _kill(child)
            reader.join()
        log.seek(0)
        tail = log.read()[-2000:]
    return _judge(answers, child.returncode, stopped, tail, options)


def _read_lines(child: subprocess.Popen[str], answers: list[dict[str, Any]], progress: Progress | None) -> None:
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            data = _decode(line)
            if "phase" in data and progress is not None:
                progress(data["phase"], data["step"], data["steps"])
            elif "result" in data or "error" in data:
                answers.append(data)


def _decode(line: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError:  # the library's own chatter
        return {}
    return data if isinstance(data, dict) else {}


def _watch(child: subprocess.Popen[str], options: EngineOptions) -> str:
    """Waits for the child; returns why it has to be stopped (empty: it ended)."""
    deadline = time.monotonic() + options.timeout_s
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL_SECONDS)
            return ""
        if time.monotonic() > deadline:
            why = f"the engine build took more than {options.timeout_s:g} s and was stopped"
            return f"{why}; raise the time-out or lower the optimization level"
        held = resident_bytes(child.pid)
        if options.memory_limit_bytes is not None and held > options.memory_limit_bytes:
            limit = options.memory_limit_bytes >> 20
            return (
                f"the engine build held {held >> 20} MiB, more than the limit of {limit} MiB, and was stopped; raise the limit"
            )


def resident_bytes(pid: int) -> int:
    """Resident memory of a process from /proc; 0 where there is no /proc or it has ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as handle:
            return int(handle.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _kill(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _judge(answers: list[dict[str, Any]], code: int, stopped: str, tail: str, options: EngineOptions) -> dict[str, Any]:
    if stopped:
        raise LimitError(stopped)
    if not answers:
        last = " ".join(tail.split())[-500:]
        raise EngineError(
            f"the {options.flavour} build process ended with code {code} and no answer: {last or 'it said nothing'}"
        )
    answer = answers[-1]
    if "result" in answer:
        return dict(answer["result"])
    kind, text = answer["kind"], answer["error"]
    if kind == "import":
        raise DependencyError(f"{options.flavour} does not load: {text}")
    if kind == "refused":
        raise UnsupportedError(f"TensorRT's parser refuses the graph: {text}")
    if kind == "dropped":
        raise VerificationError(f"{text}; the engine would ignore it")
    raise EngineError(f"TensorRT did not build the engine ({kind}): {text}")


# ---------------------------------------------------------------- the files


def _describe(
    onnx_path: Path,
    external: list[str],
    plan_path: Path,
    staging: Path,
    profiles: Sequence[Profile],
    options: EngineOptions,
    result: Mapping[str, Any],
) -> Sidecar:
    timing = staging / "timing"
    cache = None
    if timing.is_file():
        cache = {"file": f"{plan_path.name}.timing", "sha256": file_digest(timing), "bytes": timing.stat().st_size}
    driver = cuda.find_driver() if options.flavour == "tensorrt" else None
    plan = staging / "plan"
    return Sidecar(
        flavour=options.flavour,
        library_version=result["library_version"],
        compute_capabilities=_target_capabilities(options),
        profiles=tuple(p.to_dict() for p in profiles),
        inputs=tuple(TensorInfo(t["name"], t["dtype"], tuple(t["shape"])) for t in result["inputs"]),
        outputs=tuple(TensorInfo(t["name"], t["dtype"], tuple(t["shape"])) for t in result["outputs"]),
        aliases=result["aliases"],
        onnx={"file": onnx_path.name, "sha256": onnx_digest(onnx_path, external), "external": external},
        plan={"file": plan_path.name, "sha256": file_digest(plan), "bytes": plan.stat().st_size},
        timing_cache=cache,
        build={
            "seconds": result["build_seconds"],
            "parse_seconds": result["parse_seconds"],
            "peak_rss_bytes": result["peak_rss_bytes"],
            "layers": result["layers"],
            "decomposable_attention": result["decomposable_attention"],
            "options": {k: v for k, v in asdict(options).items() if k != "timing_cache"},
            "optkit": optkit.__version__,
            "host": f"{platform.system()} {platform.machine()}",
        },
        built_on=driver.devices[0].name if driver else None,
    )


def _publish(staging: Path, plan_path: Path, sidecar: Sidecar) -> None:
    """Moves the files into place: the old sidecar goes first and the new one comes last, so a plan with a sidecar is whole."""
    write_sidecar(staging / "sidecar", sidecar)
    sidecar_path(plan_path).unlink(missing_ok=True)
    os.replace(staging / "plan", plan_path)
    if sidecar.timing_cache is not None:
        os.replace(staging / "timing", f"{plan_path}.timing")
    os.replace(staging / "sidecar", sidecar_path(plan_path))
