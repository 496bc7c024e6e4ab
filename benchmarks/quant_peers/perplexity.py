"""Perplexity of a HF directory on given tokens; runs in any environment with torch and transformers.

    python perplexity.py MODEL TOKENS.json

``TOKENS.json``: ``{"window": 512, "texts": {name: [ids]}}``. Prints ``{name: perplexity}``. Each window is a text of its own,
and its first token is not predicted. Float32 throughout.
"""

import json
import math
import sys

import torch
from transformers import AutoModelForCausalLM


@torch.no_grad()
def perplexity(model, ids, window):
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, window):
        row = torch.tensor([ids[start : start + window]])
        if row.shape[1] < 2:
            break
        logits = model(row).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum"))
        count += row.shape[1] - 1
    return math.exp(total / count)


def main():
    with open(sys.argv[2]) as handle:
        tokens = json.load(handle)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    print(json.dumps({name: perplexity(model, ids, tokens["window"]) for name, ids in tokens["texts"].items()}))


if __name__ == "__main__":
    main()
