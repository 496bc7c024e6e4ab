"""Peak memory of an export against the size of the model, on a generated checkpoint.

Writes a llama-shaped checkpoint with random weights in shards (``--layers 32`` is 8.0 B parameters, 16 GB in float16),
exports it in a process of its own, and compares the peak resident memory of that process with 1.5 GB + 2 x the largest tensor.

    python benchmarks/bench_scale.py --layers 32 [--dtype fp16] [--scheme w4a16] [--dir /big/disk]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from optkit.checkpoint.store import TensorStore, write_shards

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB = 4096, 14336, 32, 8, 128256
LIMIT_BASE = 1.5e9


def tensors(layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint; all are cut from one random pool, since only sizes matter."""
    pool = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).mul_(0.02).half()

    def matrix(rows: int, columns: int) -> torch.Tensor:
        repeats = -(-rows * columns // pool.numel())
        return pool.repeat(repeats)[: rows * columns].view(rows, columns)

    yield "model.embed_tokens.weight", matrix(VOCAB, HIDDEN)
    head = HIDDEN // HEADS
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q_proj", HIDDEN), ("k_proj", KV_HEADS * head), ("v_proj", KV_HEADS * head), ("o_proj", HIDDEN)):
            yield f"{prefix}self_attn.{name}.weight", matrix(rows, HIDDEN)
        yield f"{prefix}mlp.gate_proj.weight", matrix(INTERMEDIATE, HIDDEN)
        yield f"{prefix}mlp.up_proj.weight", matrix(INTERMEDIATE, HIDDEN)
        yield f"{prefix}mlp.down_proj.weight", matrix(HIDDEN, INTERMEDIATE)
        yield f"{prefix}input_layernorm.weight", torch.ones(HIDDEN).half()
        yield f"{prefix}post_attention_layernorm.weight", torch.ones(HIDDEN).half()
    yield "model.norm.weight", torch.ones(HIDDEN).half()
    yield "lm_head.weight", matrix(VOCAB, HIDDEN)


def make_checkpoint(directory: Path, layers: int) -> None:
    directory.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": layers, "vocab_size": VOCAB,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "float16",
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    write_shards(directory, tensors(layers))


STAGES = {
    "quantize": "import optkit, sys; section = {'scheme': sys.argv[3], 'scale_search': 'minmax'}; "
    "optkit.quantize(sys.argv[1], section, sys.argv[2])",
    "export": "import optkit, sys; optkit.export(sys.argv[1], {'dtype': sys.argv[3]}, sys.argv[2])",
}


def measured(stage: str, *arguments: str) -> dict[str, float]:
    """Runs a stage in a child; its wall seconds and peak resident bytes."""
    watcher = (
        "import json, resource, subprocess, sys, time; start = time.monotonic(); "
        "subprocess.run([sys.executable, '-c', *sys.argv[1:]], check=True); "
        "print(json.dumps({'seconds': time.monotonic() - start, "
        "'peak': resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", watcher, STAGES[stage], *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{stage} failed: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--scheme", help="quantize first")
    parser.add_argument("--dir", type=Path, help="where the checkpoint and the artifact go (needs about 5 bytes a parameter)")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="optkit-scale-", dir=options.dir))
    try:
        start = time.monotonic()
        make_checkpoint(root / "checkpoint", options.layers)
        store = TensorStore.open(root / "checkpoint")
        count = sum(torch.Size(store.shape(name)).numel() for name in store.names())
        largest = max(torch.Size(store.shape(name)).numel() for name in store.names()) * 2
        print(f"{count / 1e9:.2f} B parameters, largest tensor {largest / 1e9:.2f} GB, took {time.monotonic() - start:.0f} s")
        source, limit = root / "checkpoint", LIMIT_BASE + 2 * largest
        if options.scheme:
            found = measured("quantize", str(source), str(root / "quantized"), options.scheme)
            print(f"quantize {options.scheme}: {found['seconds']:.0f} s, peak {found['peak'] / 1e9:.2f} GB")
            source = root / "quantized"
        found = measured("export", str(source), str(root / "artifact"), options.dtype)
        size = sum(path.stat().st_size for path in (root / "artifact").iterdir())
        verdict = "met" if found["peak"] <= limit else "not met"
        print(
            f"export {options.dtype}: {found['seconds']:.0f} s, artifact {size / 1e9:.2f} GB, "
            f"peak {found['peak'] / 1e9:.2f} GB, limit {limit / 1e9:.2f} GB: {verdict}"
        )
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
