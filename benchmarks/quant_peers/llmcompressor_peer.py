"""Quantizes with llm-compressor; runs in its environment.

    python llmcompressor_peer.py MODEL OUT CALIBRATION.json METHOD SYMMETRIC GROUP_SIZE

METHOD: ``gptq`` or ``rtn``. Everything else is the tool's default. Prints ``{"seconds": ...}`` as its last line.
"""

import json
import sys
import time

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    source, out, calibration, method, symmetric, group = sys.argv[1:7]
    with open(calibration) as handle:
        rows = json.load(handle)
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric == "true", strategy="group", group_size=int(group))
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    kind = GPTQModifier if method == "gptq" else QuantizationModifier
    modifier = kind(config_groups={"group_0": scheme}, ignore=["lm_head"])
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    started = time.perf_counter()
    given = {"dataset": data, "max_seq_length": len(rows[0]), "num_calibration_samples": len(rows)} if method == "gptq" else {}
    oneshot(model=model, recipe=[modifier], **given)
    seconds = time.perf_counter() - started
    model.save_pretrained(out, save_compressed=True)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
