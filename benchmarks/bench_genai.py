"""Decode speed of optkit beside onnxruntime-genai's own int4 model: same weights, same machine, interleaved rounds.

    python benchmarks/bench_genai.py [--artifact DIR] [--rounds 7] [--threads 2] [--prompt-tokens 64] [--new-tokens 128]

1. The peer gets a virtual environment of its own (``benchmarks/.peers/genai``) with onnxruntime-genai and the onnxruntime
   it asks for.
2. The peer's model is made by the peer's own builder, ``onnxruntime_genai.models.builder -p int4 -e cpu``, from the FP16
   directory that optkit reads. The builder needs torch, transformers and onnx_ir; they are lent from optkit's
   environment, behind the peer's own packages, for that one step.
3. Both run as processes that stay alive; round by round one works while the other waits. A round is a prompt of random ids
   (the same for both) and greedy tokens with no end-of-sequence stop. The first round of each does not count.

What is compared: time to first token, decode tokens/s of the tokens after the first, through each one's Python interface.
Medians, their ratio, and the smallest and largest per-round ratio are printed and written to ``benchmarks/out/genai.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import IO, Any, cast

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / "benchmarks" / ".peers" / "genai"
PEER_PYTHON = PEER / "bin" / "python"
PEER_PACKAGE = "onnxruntime-genai==0.18.0"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
ARTIFACT = ROOT / "artifacts" / "smollm2-135m-w4a16-ort" / "artifact"
RECIPE = ROOT / "recipes" / "smollm2-135m" / "w4a16-ort.yaml"
OUT = ROOT / "benchmarks" / "out" / "genai.json"


# ── the two workers: one JSON line in, one out ───────────────────────────────────────────────────────────────────────


def work_optkit(path: str, threads: int) -> Any:
    from optkit.runtime.session import open_session

    session = open_session(path, threads=threads)

    def run(prompt: list[int], new_tokens: int) -> dict[str, Any]:
        result = session.generate([prompt], max_new_tokens=new_tokens, ignore_eos=True, do_sample=False, reuse_prefix=False)
        stats = result.stats
        return {"ttft_ms": stats.ttft_ms, "tokens_per_second": stats.tokens_per_second, "new": stats.new_tokens}

    return run


def work_genai(path: str, threads: int) -> Any:
    import onnxruntime_genai as og  # only in the peer's environment

    model = og.Model(path)

    def run(prompt: list[int], new_tokens: int) -> dict[str, Any]:
        total = len(prompt) + new_tokens
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=total, min_length=total, do_sample=False)
        started = time.perf_counter()
        generator = og.Generator(model, params)
        generator.append_tokens(prompt)
        generator.generate_next_token()
        first = time.perf_counter()
        made = 1
        while not generator.is_done() and made < new_tokens:
            generator.generate_next_token()
            made += 1
        ended = time.perf_counter()
        return {"ttft_ms": (first - started) * 1000, "tokens_per_second": (made - 1) / (ended - first), "new": made}

    return run


def worker(name: str, path: str, threads: int) -> None:
    run = {"optkit": work_optkit, "genai": work_genai}[name](path, threads)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(run(request["prompt"], request["new_tokens"])), flush=True)


class Worker:
    """A worker process and its two pipes."""

    def __init__(self, name: str, python: Path | str, path: Path, threads: int) -> None:
        command = [str(python), __file__, "--worker", name, "--artifact", str(path), "--threads", str(threads)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)} if name == "optkit" else dict(os.environ)
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self._answer()

    def _answer(self) -> dict[str, Any]:
        line = cast(IO[str], self.process.stdout).readline()
        if not line:
            raise SystemExit(f"error: the {self.name} worker ended with exit code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        stdin = cast(IO[str], self.process.stdin)
        stdin.write(json.dumps({"prompt": prompt, "new_tokens": new_tokens}) + "\n")
        stdin.flush()
        return self._answer()

    def close(self) -> None:
        cast(IO[str], self.process.stdin).close()
        self.process.wait()


# ── the peer's environment and model ─────────────────────────────────────────────────────────────────────────────────


def make_environment() -> None:
    marker = PEER / ".installed"
    if marker.is_file() and marker.read_text() == PEER_PACKAGE:
        return
    print(f"making {PEER} with {PEER_PACKAGE}", file=sys.stderr)
    venv.create(PEER, with_pip=True, clear=True)
    subprocess.run([PEER_PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PEER_PACKAGE], check=True)
    marker.write_text(PEER_PACKAGE)


def make_model(model: Path, threads: int) -> Path:
    """The peer's int4 model of the same weights."""
    from optkit.checkpoint import files
    from optkit.checkpoint.model import open_checkpoint

    target = PEER / "model-int4"
    if not (target / "genai_config.json").is_file():
        print("building the peer's model with the peer's builder", file=sys.stderr)
        source = PEER / "source"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(open_checkpoint(model).directory, source)
        config = files.portable_config(files.read_json(source / "config.json"))
        (source / "config.json").write_text(json.dumps(config, indent=1))
        lent = [path for path in sys.path if path.endswith("site-packages")]
        code = (
            f"import sys, runpy; sys.path.extend({lent!r}); "
            f"sys.argv = ['builder', '-i', {str(source)!r}, '-o', {str(target)!r}, '-p', 'int4', '-e', 'cpu', "
            f"'-c', {str(PEER / 'cache')!r}]; runpy.run_module('onnxruntime_genai.models.builder', run_name='__main__')"
        )
        log = PEER / "builder.log"
        with log.open("w") as sink:
            if subprocess.run([PEER_PYTHON, "-c", code], stdout=sink, stderr=sink, check=False).returncode:
                raise SystemExit(f"error: the peer's builder failed, see {log}")
    path = target / "genai_config.json"
    config = json.loads(path.read_text())
    config["model"]["decoder"].setdefault("session_options", {})["intra_op_num_threads"] = threads
    path.write_text(json.dumps(config, indent=1))
    return target


def peer_versions() -> dict[str, str]:
    names = ("onnxruntime-genai", "onnxruntime")
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    found: dict[str, str] = json.loads(
        subprocess.run([PEER_PYTHON, "-c", code], check=True, capture_output=True, text=True).stdout
    )
    return found


# ── the comparison ───────────────────────────────────────────────────────────────────────────────────────────────────


def measure(workers: list[Worker], options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    import numpy as np

    rng = np.random.default_rng(0)
    found: dict[str, list[dict[str, Any]]] = {w.name: [] for w in workers}
    for number in range(options.rounds + 1):
        prompt = rng.integers(3, 40_000, options.prompt_tokens).tolist()
        order = workers if number % 2 else workers[::-1]
        for one in order:
            result = one.run(prompt, options.new_tokens)
            if result["new"] != options.new_tokens:
                raise SystemExit(f"error: {one.name} made {result['new']} tokens, and {options.new_tokens} were asked for")
            if number:
                found[one.name].append(result)
        print(f"round {number}/{options.rounds}", file=sys.stderr)
    return found


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    medians = {
        name: {key: statistics.median(r[key] for r in rounds) for key in ("ttft_ms", "tokens_per_second")}
        for name, rounds in found.items()
    }
    ratios = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(found["optkit"], found["genai"], strict=True)]
    return {
        "medians": medians,
        "decode_ratio": medians["optkit"]["tokens_per_second"] / medians["genai"]["tokens_per_second"],
        "decode_ratio_per_round": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--artifact", type=Path, default=ARTIFACT)
    parser.add_argument("--model", type=Path, default=MODEL, help="what the peer's model is made from")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker, str(options.artifact), options.threads)
    sys.path.insert(0, str(ROOT))
    if not (options.artifact / "optkit.json").is_file():
        if options.artifact != ARTIFACT:
            raise SystemExit(f"error: {options.artifact}: not an artifact; make one with optkit export or optkit build")
        subprocess.run(
            [sys.executable, "-m", "optkit", "build", str(RECIPE), "-o", str(ROOT / "artifacts")], check=True, cwd=ROOT
        )
    make_environment()
    model = make_model(options.model, options.threads)
    workers = [
        Worker("optkit", sys.executable, options.artifact, options.threads),
        Worker("genai", PEER_PYTHON, model, options.threads),
    ]
    try:
        found = measure(workers, options)
    finally:
        for one in workers:
            one.close()
    report(found, options)


def report(found: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    result = summary(found)
    load = os.getloadavg()
    result |= {
        "machine": {"cpu": platform.processor(), "cpus": os.cpu_count(), "load_average_1min": load[0]},
        "peer": peer_versions(),
        "settings": {"threads": options.threads, "prompt_tokens": options.prompt_tokens, "new_tokens": options.new_tokens},
        "rounds": found,
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"medians of {options.rounds} interleaved rounds, {options.threads} threads")
    print(f"{'':18}  ttft ms  decode tokens/s")
    for name, medians in result["medians"].items():
        print(f"{name:18}  {medians['ttft_ms']:7.1f}  {medians['tokens_per_second']:15.1f}")
    spread = result["decode_ratio_per_round"]
    rounds = f"(per round {spread['least']:.3f} to {spread['most']:.3f})"
    print(f"{'optkit / genai':18}  {'':7}  {result['decode_ratio']:15.3f}   {rounds}")
    print(f"load average {load[0]:.1f} on {os.cpu_count()} CPUs; trust the ratio, not the absolute numbers, when it is high")


if __name__ == "__main__":
    main()
