"""Does llama.cpp answer like the model, from the files that ``optkit export --target gguf`` writes?

    python benchmarks/gguf_parity.py DIR... --python /path/to/venv/with/llama-cpp-python/bin/python

Each DIR is an artifact of target ``gguf``. optkit continues a prompt greedily (in torch); llama.cpp then reads the same tokens,
and its logits at every position are compared with ours: KL in nats, top-1 agreement, and how far apart the two choices were
where they differ. llama.cpp rounds activations to 8 bits in front of quantized weights, so only floating-point files agree
closely. Its tokenizer is compared with the checkpoint's on a text made to be difficult.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import optkit

PROMPT = "The capital of France is"
DIFFICULT = "In 1998, 12345 people don't agree:\n\n  it's 'fun'!\tÄrger — 東京 <|im_start|>user"
THEIRS = """
import json, sys
import numpy as np
from llama_cpp import Llama
path, ids, text, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
model = Llama(path, n_ctx=1024, n_threads=2, verbose=False, logits_all=True)
model.eval(ids)
np.save(out, np.array(model.scores[: len(ids)], dtype=np.float32))
print(json.dumps(model.tokenize(text.encode(), add_bos=False, special=True)))
"""


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64) - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def compare(directory: Path, python: str, tokens: int) -> dict[str, Any]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT).ids
    with optkit.open_session(directory) as session:
        answer = session.generate([prompt], max_new_tokens=tokens, ignore_eos=True, do_sample=False).tokens[0]
        ids = [*prompt, *answer]
        ours = log_softmax(session.prefill(np.array([ids]), [len(ids)], logits="all")[0])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npy"
        command = [python, "-c", THEIRS, str(directory / "model.gguf"), json.dumps(ids), DIFFICULT, str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{directory}: llama.cpp failed:\n{done.stderr[-2000:]}")
        theirs = log_softmax(np.load(out))
    kl = (np.exp(ours) * (ours - theirs)).sum(-1)
    mine, other = ours.argmax(-1), theirs.argmax(-1)
    apart = [float(ours[i, mine[i]] - ours[i, other[i]]) for i in np.flatnonzero(mine != other)]
    return {
        "artifact": directory.name,
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "top1_agreement": float((mine == other).mean()),
        "largest_margin_nats": max(apart, default=0.0),
        "same_tokenization": json.loads(done.stdout.strip().splitlines()[-1]) == tokenizer.encode(DIFFICULT).ids,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--python", required=True, help="of an environment with llama-cpp-python and numpy")
    parser.add_argument("--tokens", type=int, default=48)
    given = parser.parse_args()
    for artifact in given.artifacts:
        print(json.dumps(compare(artifact, given.python, given.tokens)), flush=True)


if __name__ == "__main__":
    main()
