"""Will float16 hold the activations? Measured on text, in bfloat16, before anything is written.

float16 ends at 65504. Some models reach that in the residual stream after a few layers (a handful of tokens carry norms
hundreds of times the median); the export then builds, and the model answers NaN or one token for ever
(onnxruntime-genai#2444). The probe records the largest magnitude that each module puts out and refuses float16 above half its
range, naming the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from optkit.checkpoint.model import Checkpoint
from optkit.errors import UnsupportedError
from optkit.export.weights import Weights

FLOAT16_MAX = 65504.0
MARGIN = 0.5  # other text reaches further than the probe's
TOKENS = 96
TEXT = (
    "The committee met on Tuesday, 14 March 2023, to discuss three questions: the cost of the new bridge (about $4.7 million), "
    "the schedule, and who would pay.\n\nFirst, costs. Steel prices rose by 12% within a year; labour became scarce.\n\n"
    "def total(items):\n    return sum(i.price * i.count for i in items)\n\nQ: What is 17 * 23? A: 391. "
    "Zum Schluss: die Bruecke wird im Herbst fertig."
)


def probe_ids(checkpoint: Checkpoint) -> list[int]:
    """Token ids of the text, or seeded random ids where there is no tokenizer."""
    path = checkpoint.directory / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(path)).encode(TEXT).ids[:TOKENS]
        if len(ids) >= 8:
            return list(ids)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, checkpoint.spec.vocab_size, (TOKENS,), generator=generator).tolist()


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, float]]:
    """Largest magnitude of every module's floating-point outputs while the block runs."""
    peaks: dict[str, float] = {}

    def hook(name: str) -> Any:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in output if isinstance(output, tuple) else (output,):
                if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
                    peaks[name] = max(peaks.get(name, 0.0), float(tensor.abs().amax()))

        return record

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        yield peaks
    finally:
        for handle in handles:
            handle.remove()


def check_float16(checkpoint: Checkpoint, skeleton: nn.Module, weights: Weights) -> dict[str, Any]:
    """Returns the largest activation and where, for the manifest; ``skeleton`` is a bfloat16 one.

    Raises:
        UnsupportedError: it would not fit float16.
    """
    ids = probe_ids(checkpoint)
    with torch.no_grad(), weights.streamed(skeleton), recorded(skeleton) as peaks:
        skeleton(input_ids=torch.tensor([ids]))
    where = max(peaks, key=lambda name: peaks[name])
    peak = peaks[where]
    if not peak <= FLOAT16_MAX * MARGIN:
        raise UnsupportedError(
            f"dtype fp16: activations reach {peak:.3g} in {where} on {len(ids)} tokens of plain text, and float16 ends "
            "at 65504, so the model would answer NaN; export with dtype fp32 (or bf16 for target tensorrt)"
        )
    return {"peak": peak, "module": where, "tokens": len(ids), "limit": FLOAT16_MAX * MARGIN}
