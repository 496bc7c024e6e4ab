"""optkit's runtime beside its peers on a CPU: same weights, same machine, interleaved rounds in one process tree.

    python benchmarks/bench_runtime.py                          everything, 7 rounds, about half an hour after the first time
    python benchmarks/bench_runtime.py --peers genai,openvino   only these
    python benchmarks/bench_runtime.py --quick                  one short round of everything: does each peer still run?

Peers: onnxruntime-genai (int4), llama.cpp (Q4_0 and Q4_1, through llama-cpp-python), OpenVINO GenAI (int4), transformers in
torch (fp32) and the graph of transformers' ONNX exporter (fp32). ``runtime_peers/prepare.py`` makes their environments and
models, ``runtime_peers/worker.py`` is what runs in them. A peer that cannot be made is left out, and the report says why.

Scenarios, all greedy and without a stop at an end of sequence:

=========  =======================================================  =========================================
decode     64 ids, 128 tokens                                       tokens/s after the first
long       1,536 ids, 64 tokens                                     tokens/s after the first
prefill    512 ids, 2 tokens                                        512 / time to first token
batch8     8 rows of 64 ids, 64 tokens                              tokens/s after the first, rows together
cold       a new process: start, open, 64 ids, the first token      ms, with the files in the system's cache
=========  =======================================================  =========================================

Each process stays alive and waits while another works; in each round every peer runs each scenario once, the order turning
round by round. The first round of each does not count. Reported are medians, and of optkit / peer the median and range of the
per-round ratios (the machine's other load hits both sides of one round alike). Table on standard output, everything in
``benchmarks/out/runtime.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.runtime_peers import prepare  # noqa: E402  found from any working directory

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
ARTIFACT = ROOT / "artifacts" / "smollm2-135m-w4a16-ort" / "artifact"
RECIPE = ROOT / "recipes" / "smollm2-135m" / "w4a16-ort.yaml"
OUT = ROOT / "benchmarks" / "out" / "runtime.json"
WORKER = ROOT / "benchmarks" / "runtime_peers" / "worker.py"
OURS = "optkit"
SHORT_WAIT_S = 0.3  # between two runs: spinning threads of the one before have gone to sleep


@dataclass(frozen=True)
class Scenario:
    name: str
    rows: int
    prompt: int
    new: int
    unit: str

    def value(self, answer: dict[str, Any]) -> float:
        if self.name == "prefill":
            return self.rows * self.prompt * 1000.0 / float(answer["ttft_ms"])
        return float(answer["decode_tokens_per_second"])


SCENARIOS = (
    Scenario("decode", 1, 64, 128, "tokens/s"),
    Scenario("long", 1, 1536, 64, "tokens/s"),
    Scenario("prefill", 1, 512, 2, "tokens/s"),
    Scenario("batch8", 8, 64, 64, "tokens/s"),
)
QUICK = (
    Scenario("decode", 1, 16, 16, "tokens/s"),
    Scenario("long", 1, 256, 8, "tokens/s"),
    Scenario("prefill", 1, 128, 2, "tokens/s"),
    Scenario("batch8", 8, 16, 8, "tokens/s"),
)


@dataclass(frozen=True)
class Entrant:
    """One line of the table: the worker's engine, the python it runs in, and the model."""

    name: str
    engine: str
    python: str
    model: str
    versions: dict[str, str]


class Worker:
    """A worker process and its two pipes."""

    def __init__(self, entrant: Entrant, threads: int) -> None:
        self.name = entrant.name
        self.process = _start(entrant, threads)
        self.load_ms = float(self._answer()["load_ms"])

    def _answer(self) -> dict[str, Any]:
        line = cast(IO[str], self.process.stdout).readline()
        if not line:
            raise prepare.PeerFailedError(f"{self.name}: its process ended with exit code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        stdin = cast(IO[str], self.process.stdin)
        stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        stdin.flush()
        return self._answer()

    def close(self) -> None:
        cast(IO[str], self.process.stdin).close()
        self.process.wait()


def _start(entrant: Entrant, threads: int, *more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if entrant.engine == OURS:
        environment["PYTHONPATH"] = str(ROOT)
    log = prepare.PEERS / f"{entrant.name}-run.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [entrant.python, str(WORKER), entrant.engine, entrant.model, str(threads), *more]
    with log.open("a") as sink:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True, env=environment)


def cold_start(entrant: Entrant, threads: int) -> dict[str, Any]:
    """A process of its own, from its start to its first token."""
    started = time.perf_counter()
    with _start(entrant, threads, "--once") as process:
        first = cast(IO[str], process.stdout).readline()
        took = (time.perf_counter() - started) * 1000.0
        rest = cast(IO[str], process.stdout).readline()
        if not rest:
            raise prepare.PeerFailedError(f"{entrant.name}: its process ended with exit code {process.wait()}")
    return {"cold_ms": took, "load_ms": json.loads(first)["load_ms"], **json.loads(rest)}


# ── who takes part ───────────────────────────────────────────────────────────────────────────────────────────────────


def entrants(options: argparse.Namespace) -> tuple[list[Entrant], dict[str, str]]:
    """Those that could be made, and why the others could not."""
    ours = {OURS: options.artifact} | {f"{OURS}:{p.name}": p for p in options.also}
    found = [Entrant(name, OURS, sys.executable, str(path), {}) for name, path in ours.items()]
    wanted = options.peers.split(",") if options.peers else list(MAKERS)
    missing: dict[str, str] = {}
    source = prepare.make_source(options.model)
    for name in wanted:
        if name not in MAKERS:
            raise SystemExit(f"error: peer {name!r}: one of {', '.join(MAKERS)}")
        engine, environment, make = MAKERS[name]
        try:
            environment.make()
            model = make(source, options)
            found.append(Entrant(name, engine, str(environment.python), str(model), environment.versions()))
        except (prepare.PeerFailedError, OSError) as error:
            missing[name] = str(error)
            print(f"{name} is left out: {error}", file=sys.stderr)
    return found, missing


Maker = Callable[[Path, argparse.Namespace], Path]
MAKERS: dict[str, tuple[str, prepare.Environment, Maker]] = {
    "genai": ("genai", prepare.GENAI, lambda source, o: prepare.make_genai(source, o.threads)),
    "llama_cpp_q4_0": ("llama_cpp", prepare.LLAMA_CPP, lambda _, o: prepare.make_q4_0(o.model)),
    "llama_cpp_q4_1": ("llama_cpp", prepare.LLAMA_CPP, lambda _, o: o.model),
    "openvino": ("openvino", prepare.OPENVINO, lambda source, _: prepare.make_openvino(source)),
    "transformers_ort": ("transformers_ort", prepare.TRANSFORMERS, lambda source, _: prepare.make_transformers_ort(source)),
    "transformers": ("transformers", prepare.TRANSFORMERS, lambda source, _: source),
}


# ── rounds ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def measure(
    found: list[Entrant], scenarios: tuple[Scenario, ...], options: argparse.Namespace, missing: dict[str, str]
) -> dict[str, Any]:
    """``{entrant: {scenario: [value per round]}}``, with load times, memory and first tokens beside it."""
    import numpy as np

    rng = np.random.default_rng(0)
    workers: dict[str, Worker] = {}
    try:
        for entrant in found:
            _try(missing, entrant.name, lambda e=entrant: workers.__setitem__(e.name, Worker(e, options.threads)))
        values: dict[str, dict[str, list[float]]] = {name: {s.name: [] for s in scenarios} for name in workers}
        extra: dict[str, dict[str, Any]] = {name: {"load_ms": w.load_ms, "tokens": {}} for name, w in workers.items()}
        for number in range(options.rounds + 1):
            for scenario in scenarios:
                prompts = rng.integers(3, 40_000, (scenario.rows, scenario.prompt)).tolist()
                names = list(workers)
                turn = number % len(names)
                for name in names[turn:] + names[:turn]:
                    time.sleep(SHORT_WAIT_S)
                    answer = _try(missing, name, lambda n=name, p=prompts, s=scenario: workers[n].run(p, s.new))
                    if answer is None:
                        workers.pop(name).close()
                        values.pop(name)
                        continue
                    if number:
                        values[name][scenario.name].append(scenario.value(answer))
                        if "loop_share" in answer:
                            extra[name].setdefault("loop_share", {}).setdefault(scenario.name, []).append(answer["loop_share"])
                    extra[name]["tokens"][scenario.name] = answer["tokens"][:8]
                    extra[name]["peak_rss_bytes_all_scenarios"] = answer["peak_rss_bytes"]
                print(f"round {number}/{options.rounds} {scenario.name}", file=sys.stderr, flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    cold: dict[str, list[dict[str, Any]]] = {name: [] for name in values}
    for number in range(options.cold_rounds + 1):
        for entrant in [e for e in found if e.name in values]:
            answer = _try(missing, entrant.name, lambda e=entrant: cold_start(e, options.threads))
            if number and answer is not None:
                cold[entrant.name].append(answer)
        print(f"cold start {number}/{options.cold_rounds}", file=sys.stderr, flush=True)
    return {"values": values, "extra": extra, "cold": cold}


def _try(missing: dict[str, str], name: str, call: Callable[[], Any]) -> Any:
    """A peer that fails is left out from then on; optkit's failure is the script's."""
    try:
        return call()
    except (prepare.PeerFailedError, OSError) as error:
        if name.startswith(OURS):
            raise SystemExit(f"error: {error}") from error
        missing[name] = str(error)
        print(f"{name} is left out: {error}", file=sys.stderr)
        return None


def ratios(ours: list[float], theirs: list[float], smaller_is_better: bool = False) -> dict[str, float]:
    per_round = [(b / a if smaller_is_better else a / b) for a, b in zip(ours, theirs, strict=True)]
    return {"median": statistics.median(per_round), "least": min(per_round), "most": max(per_round)}


def summary(measured: dict[str, Any], scenarios: tuple[Scenario, ...]) -> dict[str, Any]:
    """Medians by scenario and entrant, ratios optkit / peer, and the best peer of each scenario."""
    result: dict[str, Any] = {}
    series = {s.name: {n: v[s.name] for n, v in measured["values"].items()} for s in scenarios}
    for key in ("cold_ms", "load_ms", "peak_rss_bytes"):
        series[key] = {n: [c[key] for c in found] for n, found in measured["cold"].items() if found}
    for name, rounds in series.items():
        small = name not in {s.name for s in scenarios}
        medians = {n: statistics.median(v) for n, v in rounds.items()}
        peers = {n: m for n, m in medians.items() if not n.startswith(OURS)}
        best = (min if small else max)(peers, key=peers.__getitem__) if peers else None
        result[name] = {
            "medians": medians,
            "ratio_to_peer": {n: ratios(rounds[OURS], rounds[n], small) for n in peers},
            "best_peer": best,
            "optkit_median_over_best_peers_median": None
            if best is None
            else (medians[best] / medians[OURS] if small else medians[OURS] / medians[best]),
        }
    return result


def report(found: dict[str, Any], units: dict[str, str]) -> None:
    for name, one in found.items():
        best = one["optkit_median_over_best_peers_median"]
        title = f"{name} [{units.get(name, 'ms')}]"
        print(f"\n{title}" + (f": {best:.2f}x the best peer, {one['best_peer']}" if best is not None else ""))
        for entrant, median in one["medians"].items():
            spread = one["ratio_to_peer"].get(entrant)
            shown = f"{median / 1e6:10.0f} MB" if name == "peak_rss_bytes" else f"{median:10.1f}"
            beside = f"   {spread['median']:6.2f}x  ({spread['least']:.2f} to {spread['most']:.2f})" if spread else ""
            print(f"  {entrant:24}{shown}{beside}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--artifact", type=Path, default=ARTIFACT)
    parser.add_argument("--also", type=Path, action="append", default=[], help="another artifact; repeatable")
    parser.add_argument("--model", type=Path, default=MODEL, help="the GGUF file every peer's model is made from")
    parser.add_argument("--peers", default="", help="comma separated; default: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cold-rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one short round of everything")
    parser.add_argument("--prepare-only", action="store_true", help="make environments and models, measure nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.quick:
        options.rounds = options.cold_rounds = 1
    if not (options.artifact / "optkit.json").is_file():
        if options.artifact != ARTIFACT:
            raise SystemExit(f"error: {options.artifact}: not an artifact; make one with optkit export or optkit build")
        command = [sys.executable, "-m", "optkit", "build", str(RECIPE), "-o", str(ROOT / "artifacts")]
        subprocess.run(command, check=True, cwd=ROOT)
    found, missing = entrants(options)
    if options.prepare_only:
        print("ready: " + ", ".join(e.name for e in found) + (f"; left out: {missing}" if missing else ""))
        return
    scenarios = QUICK if options.quick else SCENARIOS
    load = os.getloadavg()[0]
    measured = measure(found, scenarios, options, missing)
    result = {
        "machine": {"cpu": platform.processor(), "cpus": os.cpu_count(), "load_average_before": load},
        "settings": {"threads": options.threads, "rounds": options.rounds, "scenarios": [vars(s) for s in scenarios]},
        "versions": {e.name: e.versions for e in found},
        "left_out": missing,
        "summary": summary(measured, scenarios),
        **measured,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    report(result["summary"], {s.name: s.unit for s in scenarios} | {"peak_rss_bytes": "peak resident memory"})
    for name, why in missing.items():
        print(f"left out: {name}: {why}")
    print(f"\nload average before: {load:.1f} on {os.cpu_count()} CPUs; when it is high, trust the ratios alone")


if __name__ == "__main__":
    main()
