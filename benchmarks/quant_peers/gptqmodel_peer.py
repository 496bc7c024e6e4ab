"""Quantizes with GPTQModel; runs in its environment. Arguments and output as llmcompressor_peer.py."""

import json
import sys
import time

from gptqmodel import GPTQModel, QuantizeConfig
from transformers import AutoTokenizer


def main():
    source, out, calibration, _, symmetric, group = sys.argv[1:7]
    with open(calibration) as handle:
        rows = json.load(handle)
    data = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
    config = QuantizeConfig(bits=4, group_size=int(group), sym=symmetric == "true", device="cpu")
    model = GPTQModel.load(source, config)
    started = time.perf_counter()
    model.quantize(data, batch_size=1)
    seconds = time.perf_counter() - started
    model.save(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
