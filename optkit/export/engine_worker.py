"""The process that builds an engine: ``python -m optkit.export.engine_worker JOB.json``.

The only file that imports TensorRT to build with it, and it is only run as a child of :mod:`optkit.export.engine`: a build
that never ends (NVIDIA/TensorRT#2928) can be killed, its memory is its own, and a crash inside the library takes nothing
with it. It speaks JSON lines on standard output: ``{"phase", "step", "steps"}`` while building and one ``{"result"}`` or
``{"error", "kind"}`` at the end. Nothing of optkit with weight is imported, so the measured memory is the builder's.

Networks are strongly typed: the types in the graph are the types of the engine, and norms that the exporter keeps in
float32 stay there. (Weakly typed builders reduced decomposed norms to fp16: NVIDIA/TensorRT#2338, #2869, #3657.)
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Emit = Callable[[dict[str, Any]], None]
#: noise that a machine without a GPU makes; not about the network
NOISE = (
    "catchCudaError",
    "CUDA initialization",
    "Unable to determine GPU memory usage",
    "no CUDA-capable device",
    "CUDA lazy loading",
    "Int64 binding",
)


class BuildFailed(Exception):
    """The library said no. ``kind`` is ``refused`` (parser), ``dropped``, ``profile`` or ``failed`` (builder)."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def peak_rss() -> int:
    """Most bytes this program held; ``ru_maxrss`` would include what its parent held when it started this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024


def make_logger(trt: Any, keep: list[str]) -> Any:
    """A logger that keeps warnings and errors; the library writes nothing to the terminal."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.WARNING and not any(n in message for n in NOISE):
                keep.append(message)

    return Logger()


def make_monitor(trt: Any, emit: Emit) -> Any:
    """A progress monitor that emits one line per step."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.steps[phase_name] = num_steps
            emit({"phase": phase_name, "step": 0, "steps": num_steps})

        def step_complete(self, phase_name: str, step: int) -> bool:
            emit({"phase": phase_name, "step": step + 1, "steps": self.steps.get(phase_name, 0)})
            return True

        def phase_finish(self, phase_name: str) -> None:
            emit({"phase": phase_name, "step": self.steps.get(phase_name, 0), "steps": self.steps.get(phase_name, 0)})

    return Monitor()


def parse(trt: Any, builder: Any, logger: Any, onnx: str) -> tuple[Any, Any]:
    """``(network, parser)``; the parser owns weights of the network and has to live as long.

    Raises:
        BuildFailed: refused, with operator and node name of every error.
    """
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(onnx):  # from a file, so that external weights are found
        found = [parser.get_error(i) for i in range(parser.num_errors)]
        lines = [
            f"{e.node_name() or 'node ' + str(e.node())} ({e.node_operator() or 'graph'}): {one_line(e.desc())}" for e in found
        ]
        raise BuildFailed("refused", "; ".join(lines) or "the parser refused the graph without a reason")
    return network, parser


def one_line(text: str) -> str:
    return " ".join(text.split())


def layers(network: Any) -> Iterator[Any]:
    return (network.get_layer(i) for i in range(network.num_layers))


def layer_inputs(layer: Any) -> Iterator[Any]:
    return (t for t in (layer.get_input(i) for i in range(layer.num_inputs)) if t is not None)


def dropped_inputs(network: Any) -> list[str]:
    """Network inputs from which no path of layers leads to a network output: the parser dropped their use, or it was dead."""
    producer: dict[str, Any] = {}
    pending = [network.get_output(i).name for i in range(network.num_outputs)]
    for layer in layers(network):
        for index in range(layer.num_outputs):
            producer[layer.get_output(index).name] = layer
        if any(tied in str(layer.type) for tied in ("ATTENTION", "CONDITION", "LOOP", "TRIP", "ITERATOR", "RECURRENCE")):
            pending += [t.name for t in layer_inputs(layer)]  # tied to their other end inside the library: taken as live
    reached: set[str] = set()
    while pending:
        name = pending.pop()
        if name in reached:
            continue
        reached.add(name)
        layer = producer.get(name)
        if layer is not None:
            pending += [t.name for t in layer_inputs(layer)]
    return [t.name for t in (network.get_input(i) for i in range(network.num_inputs)) if t.name not in reached]


def attention_layers(trt: Any, network: Any) -> Iterator[tuple[str, Any]]:
    """``(layer name, IAttention)`` of every attention in the network."""
    for layer in layers(network):
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            yield layer.name, layer.attention


def decompose_attention(trt: Any, network: Any) -> list[str]:
    """Marks every attention as decomposable; a dedicated kernel is still used where there is one. Returns their names."""
    marked = []
    for name, attention in attention_layers(trt, network):
        attention.decomposable = True
        marked.append(name)
    return marked


def aliases(trt: Any, network: Any) -> dict[str, str]:
    """Output -> the input whose memory it shares, from the cache updates of the network."""
    return {
        layer.get_output(0).name: layer.get_input(0).name
        for layer in layers(network)
        if layer.type == trt.LayerType.KV_CACHE_UPDATE
    }


DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
    "UINT8": "uint8",
    "FP8": "float8_e4m3fn",
}


def tensor_info(tensor: Any) -> dict[str, Any]:
    return {"name": tensor.name, "dtype": DTYPES[str(tensor.dtype).split(".")[-1]], "shape": list(tensor.shape)}


def configure(trt: Any, builder: Any, network: Any, job: Mapping[str, Any]) -> Any:
    """The builder configuration of a job.

    Raises:
        BuildFailed: a profile the library does not accept, naming it.
    """
    config = builder.create_builder_config()
    if job["compute_capabilities"]:
        config.num_compute_capabilities = len(job["compute_capabilities"])
        for index, value in enumerate(job["compute_capabilities"]):
            config.set_compute_capability(getattr(trt.ComputeCapability, "SM" + value.replace(".", "")), index)
    if job["workspace_bytes"]:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, job["workspace_bytes"])
    if job["optimization_level"] is not None:
        config.builder_optimization_level = job["optimization_level"]
    if job["fail_on_timing_cache_miss"]:
        config.set_flag(trt.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS)
    names = {network.get_input(i).name for i in range(network.num_inputs)}
    for profile in job["profiles"]:
        entry = builder.create_optimization_profile()
        for name, (low, best, high) in profile["shapes"].items():
            if name not in names:
                raise BuildFailed("profile", f"profile {profile['name']}: the network has no input {name}")
            entry.set_shape(name, low, best, high)
        if config.add_optimization_profile(entry) < 0:
            raise BuildFailed("profile", f"profile {profile['name']} was not accepted")
    return config


def use_timing_cache(config: Any, path: str | None) -> None:
    stored = Path(path).read_bytes() if path and Path(path).is_file() else b""
    cache = config.create_timing_cache(stored)
    if cache is None or not config.set_timing_cache(cache, False):
        raise BuildFailed(
            "failed", f"the timing cache {path or '(empty)'} was not accepted: made by another version or for another GPU?"
        )


def save_timing_cache(config: Any, path: str) -> None:
    cache = config.get_timing_cache()
    if cache is not None:
        Path(path).write_bytes(memoryview(cache.serialize()))


def run_job(job: Mapping[str, Any], emit: Emit) -> dict[str, Any]:
    """Parses, checks and builds; returns the facts for the sidecar. ``job["plan"]`` empty stops after the checks.

    Raises:
        BuildFailed: with what the library said. Its traceback does not reach the library's objects: kept alive in one and
            collected during a later call, a builder waits for a lock that this call holds, for ever (seen with RTX 1.7.1).
    """
    try:
        return _run_job(job, emit)
    except BuildFailed as error:
        kind, text = error.kind, str(error)
    raise BuildFailed(kind, text)


def _run_job(job: Mapping[str, Any], emit: Emit) -> dict[str, Any]:
    trt = importlib.import_module(job["flavour"])
    said: list[str] = []
    logger = make_logger(trt, said)
    builder = trt.Builder(logger)
    started = time.monotonic()
    network, parser = parse(trt, builder, logger, job["onnx"])
    dropped = dropped_inputs(network)
    if dropped:
        raise BuildFailed(
            "dropped", f"the parser dropped the use of {', '.join(dropped)}: no layer on the way to an output reads it"
        )
    causal = [name for name, attention in attention_layers(trt, network) if attention.causal]
    decomposable = decompose_attention(trt, network) if job["decompose_attention"] else []
    result: dict[str, Any] = {
        "library_version": trt.__version__,
        "inputs": [tensor_info(network.get_input(i)) for i in range(network.num_inputs)],
        "outputs": [tensor_info(network.get_output(i)) for i in range(network.num_outputs)],
        "aliases": aliases(trt, network),
        "layers": network.num_layers,
        "causal_attention": causal,
        "decomposable_attention": len(decomposable),
        "parse_seconds": round(time.monotonic() - started, 3),
    }
    if job["plan"]:
        result |= _build(trt, builder, network, job, emit, said)
    del parser
    result["messages"] = said[-50:]
    result["peak_rss_bytes"] = peak_rss()
    return result


def _build(trt: Any, builder: Any, network: Any, job: Mapping[str, Any], emit: Emit, said: list[str]) -> dict[str, Any]:
    config = configure(trt, builder, network, job)
    timed = job["flavour"] == "tensorrt"  # TensorRT-RTX chooses kernels on the user's machine and times nothing here
    if timed:
        use_timing_cache(config, job["timing_cache_in"])
    monitor = make_monitor(trt, emit)
    config.progress_monitor = monitor
    started = time.monotonic()
    plan = builder.build_serialized_network(network, config)
    seconds = time.monotonic() - started
    if plan is None:
        raise BuildFailed("failed", "; ".join(one_line(m) for m in said[-3:]) or "the builder gave no plan and no reason")
    Path(job["plan"]).write_bytes(memoryview(plan))
    if timed:
        save_timing_cache(config, job["timing_cache_out"])
    return {"build_seconds": round(seconds, 3), "plan_bytes": plan.nbytes}


def main() -> int:
    """Runs the job file named on the command line; 0 when the plan is written."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))

    def emit(line: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    try:
        emit({"result": run_job(job, emit)})
    except BuildFailed as error:
        emit({"error": str(error), "kind": error.kind})
        return 1
    except ImportError as error:
        emit({"error": str(error), "kind": "import"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
