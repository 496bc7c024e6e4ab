"""The reference backend: the checkpoint itself, in torch, through transformers' own model code.

It is slow and plain on purpose: one cache per row and no padding anywhere, so that neither can be wrong. Truncation drops the
row's cache and reads the row again, which is exact for every kind of state (windows, recurrent layers). Prompts are read in
one piece. Rotary tables that depend on the length (``longrope``, ``dynamic``) answer as the uncached forward would: a row is
read again when its table changes.

Weights are stored in the checkpoint's precision and computed in ``dtype`` (float32 by default). Logits come as float32.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optkit import manifest
from optkit.checkpoint.model import open_checkpoint
from optkit.errors import EngineError, UsageError, nearest
from optkit.runtime.base import Ids, Logits, Session
from optkit.runtime.limits import SessionLimits

OPTIONS = ("dtype", "packed")
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
ONE_PIECE = 2**31  # tokens: a prompt is never split


def open_backend(
    path: str | Path, threads: int | None = None, limits: SessionLimits | None = None, dtype: str = "fp32", packed: bool = True
) -> TorchSession:
    """Loads a HF directory, hub id, GGUF file, quantized checkpoint, or an artifact of target ``gguf``.

    Args:
        path: the checkpoint.
        threads: CPU threads, for the whole process (torch has one pool); ``None`` leaves torch's choice.
        limits: see :class:`SessionLimits`.
        dtype: ``fp32``, ``fp64``, ``fp16`` or ``bf16`` for the computation.
        packed: keep quantized weights packed and dequantize them as they are used.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r}: one of {', '.join(DTYPES)}{nearest(dtype, tuple(DTYPES))}")
    if threads is not None:
        torch.set_num_threads(threads)
    checkpoint = open_checkpoint(_model_file(path))
    model = checkpoint.load(dtype=DTYPES[dtype], packed=packed)
    return TorchSession(model, checkpoint.spec, checkpoint.directory, limits or SessionLimits())


def _model_file(path: str | Path) -> str | Path:
    """The GGUF file of an artifact that is one; else ``path``."""
    if not (Path(path) / manifest.FILE_NAME).is_file():
        return path
    read = manifest.read_manifest(path)
    if read.kind != "artifact" or read.facts.get("target") != "gguf":
        return path
    manifest.check_files(Path(path), read)
    return Path(path) / str(read.facts["model_file"])


class TorchSession(Session):
    """A transformers model behind the session contract.

    Args:
        model: a causal language model in eval mode.
        spec: its facts.
        directory: where its tokenizer is.
        limits: as given by the user.
    """

    backend = "torch"

    def __init__(self, model: Any, spec: Any, directory: Path, limits: SessionLimits) -> None:
        super().__init__(spec, Path(directory), spec.max_seq_len, dataclasses.replace(limits, prefill_chunk=ONE_PIECE))
        self.model = model
        self._dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self._caches: list[Any] = []
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._keeps_logits = "logits_to_keep" in accepted
        rope, length = _rope(model.config)
        self.rope_switch = length if rope == "longrope" else None
        self._always_read = length if rope == "dynamic" else None

    def cache_bytes(self, batch: int, length: int) -> int:
        spec = self.spec
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * self._dtype.itemsize * batch * length

    def _allocate(self, batch: int, capacity: int) -> None:
        self._caches = [None] * batch

    def _resize(self, capacity: int) -> None:
        """Each row's cache grows by itself."""

    def _truncate(self, lengths: Ids) -> None:
        for row, length in enumerate(lengths.tolist()):
            if length < len(self._rows[row]):
                self._caches[row] = None

    def _select(self, rows: Ids) -> None:
        wanted = rows.tolist()
        self._caches = [
            self._caches[r] if wanted.index(r) == i else copy.deepcopy(self._caches[r]) for i, r in enumerate(wanted)
        ]

    def _step(self, tokens: Ids) -> Logits:
        return self._extend(tokens[:, None], np.ones(len(tokens), np.int64), every=False)

    def _extend(self, ids: Ids, counts: Ids, every: bool) -> Logits:
        result: Logits | None = None
        for row, count in enumerate(counts.tolist()):
            if count == 0:
                continue
            logits = self._run(row, ids[row, :count].tolist(), count if every else 1)
            if result is None:
                shape = (len(ids), ids.shape[1], logits.shape[-1]) if every else (len(ids), logits.shape[-1])
                result = np.zeros(shape, np.float32)
            if every:
                result[row, :count] = logits
            else:
                result[row] = logits[-1]
        assert result is not None, "some row has a token"
        return result

    def _run(self, row: int, new: list[int], keep: int) -> Logits:
        """Reads ``new`` (and the row's older tokens where its cache was dropped); logits ``[keep, V]`` of the last ones."""
        total = len(self._rows[row]) + len(new)
        if self._always_read is not None and total > self._always_read:
            self._caches[row] = None
        cache = self._caches[row]
        tokens = new if cache is not None else self._rows[row] + new
        arguments: dict[str, Any] = {self._cache_name: cache} if cache is not None else {}
        if self._keeps_logits:
            arguments["logits_to_keep"] = keep
        try:
            with torch.inference_mode():
                output = self.model(
                    input_ids=torch.tensor([tokens]),
                    attention_mask=torch.ones(1, total, dtype=torch.long),
                    use_cache=True,
                    **arguments,
                )
        except RuntimeError as error:
            raise EngineError(f"{self.directory}: torch failed on {len(tokens)} tokens of row {row}: {error}") from error
        self._caches[row] = output.get(self._cache_name)
        logits: Logits = output.logits[0, -keep:].float().numpy()
        return logits


def _rope(config: Any) -> tuple[str | None, int]:
    """The length-dependent rotary type and the length at which it changes, if the model has one.

    Models with several kinds of layers keep one set of parameters per kind.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    groups = [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    for group in groups:
        kind = group.get("rope_type")
        if kind in ("longrope", "dynamic"):
            original = group.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
            return kind, int(original or text.max_position_embeddings)
    return None, 0
