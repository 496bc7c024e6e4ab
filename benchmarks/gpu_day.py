"""Everything that needs an NVIDIA GPU, in one run of less than eight minutes: ``python benchmarks/gpu_day.py ARTIFACT [...]``.

For the day a GPU is lent. Per artifact (target ``tensorrt``), each step under its own time budget, so that one slow step does
not take the others with it; what was measured so far is written after every step:

1. **engine**   load the plan, or build it with the library that is installed (TensorRT-RTX, or standard TensorRT on Hopper);
2. **parity**   the engine against the very ONNX it was built from, in ONNX Runtime on the CPU: ragged prompts, decode steps
                of a forced continuation, a row of S_max tokens; logit error, KL, top-1 agreement;
3. **graphs**   the same decode steps with and without CUDA graphs have to give the same bits;
4. **speed**    time to the first token, inter-token latency P50/P99, tokens/s for 1 and 4 rows, with and without CUDA graphs,
                and greedy decoding with the largest logit found on the host and on the device;
5. **torch**    the same model in torch fp16 on the same GPU (when ``--checkpoint`` is given): the same latencies, and parity.

The report is JSON on standard output or ``--output``; the exit status is 0 only if every parity check held. ``--stand-in``
runs the same script over the tests' stand-in engine on the CPU: that proves the script, and no number in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from optkit import cuda, manifest  # noqa: E402
from optkit.errors import OptkitError  # noqa: E402

TOTAL_SECONDS = 460.0
#: largest logit error over the logit range, and mean KL in nats, that two float16 computations may differ by
LOGIT_ERROR, KL_MEAN = 0.02, 0.005
PROMPT, STEPS, ROWS = 48, 32, 3


class Clock:
    """What is left of the time, and what each step took."""

    def __init__(self, total: float) -> None:
        self.end = time.monotonic() + total

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def compare(ours: np.ndarray, want: np.ndarray) -> dict[str, float]:
    """Logit error (of the range), mean KL (nats) and top-1 agreement of ``[..., V]`` logits."""
    p, q = softmax(want), softmax(ours)
    kl = (p * (np.log(p + 1e-30) - np.log(q + 1e-30))).sum(-1)
    return {
        "logit_error": float(np.abs(ours - want).max() / np.ptp(want)),
        "kl_mean": float(kl.mean()),
        "top1": float((ours.argmax(-1) == want.argmax(-1)).mean()),
    }


def prompts(vocab: int, slots: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    width = min(PROMPT, slots // 2)
    return rng.integers(3, vocab, (ROWS, width)), np.array([width, width // 3, width - 1])


def scripted(session: Any, ids: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """The logits of a ragged prompt at its last position, and of a forced continuation."""
    rng = np.random.default_rng(1)
    forced = rng.integers(3, session.spec.vocab_size, (len(ids), STEPS))
    first = session.prefill(ids, lengths)
    steps = [session.decode(forced[:, i]) for i in range(STEPS)]
    full = rng.integers(3, session.spec.vocab_size, (1, session.max_seq_len))
    return {"prefill": first, "decode": np.stack(steps, 1), "full": session.prefill(full)}


class OrtReference:
    """The artifact's ONNX file in ONNX Runtime on the CPU, behind the same session class: the stand-in of the tests."""

    @staticmethod
    def open(directory: Path, device_sampling: bool = False, **ignored: Any) -> Any:
        from optkit.export.artifact_engine import artifact_profiles, read_build_file
        from optkit.runtime.backends import trt
        from optkit.runtime.backends._trt_device import HostDevice, TorchDevice
        from tests.runtime import standin

        graph, spec = trt._described(directory)
        model = directory / str(manifest.read_manifest(directory).facts["model_file"])
        engine = standin.Engine(model, [p.shapes for p in artifact_profiles(directory, read_build_file(directory))])
        device = TorchDevice("cpu") if device_sampling else HostDevice()
        return trt.make_session(engine, device, graph, spec, directory, device_sampling=device_sampling)


def step_engine(directory: Path, clock: Clock, flavour: str | None) -> dict[str, Any]:
    """Builds the plan unless a fitting one is there."""
    from optkit.export.artifact_engine import PLAN_FILE, build_artifact, read_build_file
    from optkit.export.profiles import RTX_CAPABILITIES
    from optkit.sidecar import check_sidecar

    driver = cuda.find_driver()
    assert driver is not None, "a machine with a GPU"
    capability = driver.devices[0].capability
    try:
        sidecar = check_sidecar(directory / PLAN_FILE, capability=capability)
        return {"plan": "loaded", "library": f"{sidecar.flavour} {sidecar.library_version}", "capability": capability}
    except OptkitError as error:
        reason = str(error)
    plan = read_build_file(directory)
    chosen = flavour or ("tensorrt_rtx" if capability in RTX_CAPABILITIES else "tensorrt")
    wanted = (capability,) if chosen == "tensorrt_rtx" else ()
    options = dataclasses.replace(
        plan.options, flavour=chosen, compute_capabilities=wanted, timeout_s=max(30.0, clock.left - 200)
    )
    report = build_artifact(directory, dataclasses.replace(plan, options=options))
    return {
        "plan": f"built, because {reason}",
        "library": f"{chosen} {report.sidecar.library_version}",
        "capability": capability,
        "build_seconds": report.build_seconds,
        "plan_bytes": report.plan_bytes,
        "peak_rss_bytes": report.peak_rss_bytes,
    }


def step_parity(session: Any, directory: Path) -> dict[str, Any]:
    ids, lengths = prompts(session.spec.vocab_size, session.max_seq_len)
    with OrtReference.open(directory) as reference:
        want = scripted(reference, ids, lengths)
    ours = scripted(session, ids, lengths)
    result: dict[str, Any] = {name: compare(ours[name], want[name]) for name in want}
    result["passed"] = all(r["logit_error"] < LOGIT_ERROR and r["kl_mean"] < KL_MEAN for r in result.values())
    return result


def step_graphs(opened: Callable[..., Any]) -> dict[str, Any]:
    with opened(cuda_graphs=True) as graphs, opened(cuda_graphs=False) as plain:
        ids, lengths = prompts(graphs.spec.vocab_size, graphs.max_seq_len)
        one, other = scripted(graphs, ids, lengths), scripted(plain, ids, lengths)
        state = graphs.cuda_graph
        same = {name: bool(np.array_equal(one[name], other[name])) for name in one}
        close = {name: compare(one[name], other[name])["logit_error"] for name in one}
    return {"state": state, "same_bits": same, "logit_error": close, "passed": max(close.values()) < LOGIT_ERROR}


def latencies(session: Any, rows: int, prompt: int, steps: int) -> dict[str, float]:
    """Milliseconds: time to the first token, inter-token P50 and P99; tokens/s over all rows. After a warm-up."""
    rng = np.random.default_rng(2)
    ids = rng.integers(3, session.spec.vocab_size, (rows, prompt))
    session.prefill(ids)
    for _ in range(4):
        session.decode(np.full(rows, 5))
    first, between = [], []
    for _ in range(5):
        started = time.perf_counter()
        session.prefill(ids)
        first.append(time.perf_counter() - started)
    for _ in range(steps):
        started = time.perf_counter()
        session.decode(np.full(rows, 5), copy=False)
        between.append(time.perf_counter() - started)
    p50, p99 = np.percentile(between, [50, 99]) * 1000
    return {
        "ttft_ms": float(np.median(first) * 1000),
        "itl_p50_ms": float(p50),
        "itl_p99_ms": float(p99),
        "tokens_per_s": float(rows * len(between) / sum(between)),
    }


def step_speed(opened: Callable[..., Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for graphs in (True, False):
        with opened(cuda_graphs=graphs) as session:
            width = min(512, session.max_seq_len // 2)
            steps = min(200, session.max_seq_len - width - 8)
            for rows in (1, session.limits.max_batch):
                result[f"{'graphs' if graphs else 'plain'}_b{rows}_p{width}"] = latencies(session, rows, width, steps)
    return result


def greedy(session: Any, rows: int, prompt: int, steps: int) -> dict[str, Any]:
    """Tokens/s of the whole loop, choice included, and a digest of the tokens."""
    ids = np.random.default_rng(2).integers(3, session.spec.vocab_size, (rows, prompt)).tolist()
    session.generate(ids, max_new_tokens=4, ignore_eos=True)
    started = time.perf_counter()
    tokens = session.generate(ids, max_new_tokens=steps, ignore_eos=True).tokens
    return {"tokens_per_s": rows * steps / (time.perf_counter() - started), "tokens": tokens}


def step_choice(opened: Callable[..., Any]) -> dict[str, Any]:
    """The largest logit found on the host and on the device: the same tokens, and what each costs."""
    found: dict[str, dict[str, Any]] = {}
    for name, wanted in (("host", False), ("device", True)):
        with opened(device_sampling=wanted) as session:
            steps = min(100, session.max_seq_len // 2 - 8)
            found[name] = greedy(session, session.limits.max_batch, min(64, session.max_seq_len // 4), steps)
    tokens = [entry.pop("tokens") for entry in found.values()]
    return {**found, "passed": tokens[0] == tokens[1]}


def step_torch(checkpoint: str, session: Any) -> dict[str, Any]:
    """transformers in float16 on the GPU, with its own static cache left to its default."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float16).cuda().eval()
    rng = np.random.default_rng(2)
    width = min(512, session.max_seq_len // 2)
    ids = torch.from_numpy(rng.integers(3, session.spec.vocab_size, (1, width))).cuda()
    with torch.inference_mode():
        want = model(input_ids=ids).logits[:, -1].float().cpu().numpy()
        first, between = [], []
        for _ in range(6):
            torch.cuda.synchronize()
            started = time.perf_counter()
            out = model(input_ids=ids, use_cache=True)
            torch.cuda.synchronize()
            first.append(time.perf_counter() - started)
        past = out.past_key_values
        for _ in range(100):
            started = time.perf_counter()
            out = model(input_ids=ids[:, :1], past_key_values=past, use_cache=True)
            past = out.past_key_values
            torch.cuda.synchronize()
            between.append(time.perf_counter() - started)
    p50, p99 = np.percentile(between[5:], [50, 99]) * 1000
    parity = compare(session.prefill(ids.cpu().numpy()), want)
    return {
        "ttft_ms": float(np.median(first[1:]) * 1000),
        "itl_p50_ms": float(p50),
        "itl_p99_ms": float(p99),
        "tokens_per_s": float(95 / sum(between[5:])),
        "parity": parity,
    }


def run_artifact(
    directory: Path, clock: Clock, arguments: argparse.Namespace, save: Callable[[], None], report: dict[str, Any]
) -> bool:
    """The five steps; a step that fails is recorded and the next one tried. True if all parity held."""
    passed = True

    def opened(**options: Any) -> Any:
        if arguments.stand_in:
            return OrtReference.open(directory, **options)
        from optkit.runtime.session import open_session

        return open_session(directory, check_digest=False, **options)

    def attempt(name: str, least: float, step: Callable[[], dict[str, Any]]) -> None:
        nonlocal passed
        if clock.left < least:
            report[name] = {"skipped": f"{clock.left:.0f} s left, {least:.0f} are needed"}
            passed = passed and name not in ("engine", "parity")
            return
        started = time.monotonic()
        try:
            report[name] = step()
        except Exception as error:  # recorded: the other steps still have something to say
            report[name] = {"failed": f"{type(error).__name__}: {error}", "passed": False}
        report[name]["seconds"] = round(time.monotonic() - started, 1)
        passed = passed and report[name].get("passed", True)
        save()

    def parity() -> dict[str, Any]:
        with opened() as session:
            return step_parity(session, directory)

    def against_torch() -> dict[str, Any]:
        with opened() as session:
            return step_torch(arguments.checkpoint, session)

    if not arguments.stand_in:
        attempt("engine", 60, lambda: step_engine(directory, clock, arguments.flavour))
    attempt("parity", 30, parity)
    if not arguments.stand_in:
        attempt("graphs", 20, lambda: step_graphs(opened))
    attempt("speed", 20, lambda: step_speed(opened))
    attempt("choice", 20, lambda: step_choice(opened))
    if arguments.checkpoint:
        attempt("torch", 40, against_torch)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("artifacts", nargs="+", type=Path, help="artifact directories (target tensorrt)")
    parser.add_argument("--checkpoint", help="the checkpoint they were made from, to compare with torch")
    parser.add_argument("--flavour", choices=("tensorrt_rtx", "tensorrt"), help="library to build with; found out if left out")
    parser.add_argument("--output", type=Path, help="write the report here, after every step")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="time for everything")
    parser.add_argument(
        "--stand-in", action="store_true", help="no GPU: the stand-in engine on the CPU; proves the script only"
    )
    arguments = parser.parse_args()
    clock = Clock(arguments.seconds)
    driver = cuda.find_driver()
    report: dict[str, Any] = {"driver": dataclasses.asdict(driver) if driver else cuda.why_no_driver(), "artifacts": {}}
    if driver is None and not arguments.stand_in:
        print(f"error: {cuda.why_no_driver()}; this script is for a machine with an NVIDIA GPU (--stand-in tries it without)")
        return 4
    if arguments.stand_in:
        report["note"] = "stand-in engine on the CPU: no number here is one of TensorRT"

    def save() -> None:
        if arguments.output:
            arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    passed = True
    for directory in arguments.artifacts:
        entry = report["artifacts"].setdefault(str(directory), {})
        passed = run_artifact(directory, clock, arguments, save, entry) and passed
    report["passed"] = passed
    save()
    print(json.dumps(report, indent=1))
    return 0 if passed else 6


if __name__ == "__main__":
    sys.exit(main())
