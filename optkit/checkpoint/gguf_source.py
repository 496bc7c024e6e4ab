"""A GGUF file as the weights of a checkpoint, packed to packed.

The file is read in place, tensor by tensor: blocks become codes and scales (gguf_blocks.py), rows of q and k get the order
transformers computes with, codes and all, and names become the Hugging Face ones. Nothing is dequantized and nothing copied.
Config and tokenizer are made by transformers from the file's metadata (gguf_support.py) and kept in a cache directory
(gguf_cache.py); what it leaves out of the config is added here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optkit.checkpoint.affine import QuantizedWeight, take_rows
from optkit.checkpoint.gguf_blocks import BLOCKS, quantized_blocks
from optkit.checkpoint.gguf_file import GgufFile
from optkit.checkpoint.gguf_layout import READ, Layout, hf_rows
from optkit.checkpoint.packed import Packed
from optkit.checkpoint.store import TensorStore
from optkit.errors import CheckpointError, UnsupportedError

PLAIN = {"F32": (np.float32, torch.float32), "F16": (np.float16, torch.float16), "BF16": (np.int16, torch.bfloat16)}
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def layout_of(file: GgufFile) -> Layout | None:
    """The layout of the file's architecture if its weights can be taken packed: dense decoders of :data:`READ`."""
    if file.of_model("expert_count"):
        return None
    return READ.get(file.architecture)


class GgufStore(TensorStore):
    """The tensors of a GGUF file by their Hugging Face names; blocks as the uint8 bytes they are."""

    def __init__(self, file: GgufFile, layout: Layout) -> None:
        super().__init__({})
        self.file, self.layout = file, layout
        self._own: dict[str, str] = {}
        for name in file.tensors:
            if name != ROPE_FACTORS:  # it is a part of the config
                self._own[layout.hf_name(name) or name] = name
        heads = int(file.of_model("attention.head_count", 0))
        self._heads = heads, int(file.of_model("attention.head_count_kv", heads))

    def names(self) -> list[str]:
        return list(self._own)

    def __contains__(self, name: object) -> bool:
        return name in self._own

    def __len__(self) -> int:
        return len(self._own)

    def own(self, name: str) -> Any:
        """The file's tensor behind a Hugging Face name."""
        if name not in self._own:
            raise CheckpointError(f"{self.file.path}: has no tensor {name}")
        return self.file.tensors[self._own[name]]

    def kind(self, name: str) -> str:
        return str(self.own(name).kind)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.own(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        kind = self.kind(name)
        return PLAIN[kind][1] if kind in PLAIN else torch.uint8

    def nbytes(self, name: str) -> int:
        tensor = self.own(name)
        return int(tensor.end - tensor.begin)

    def rows(self, name: str) -> Tensor | None:
        """The order of the rows, where the file has another."""
        own = self._own[name]
        heads = self.layout.heads_of(own, *self._heads)
        return None if heads is None else hf_rows(self.shape(name)[0], heads)

    def get(self, name: str) -> Tensor:
        """A tensor stored in floating point, in Hugging Face's layout."""
        tensor = self.own(name)
        if tensor.kind not in PLAIN:
            raise UnsupportedError(f"{self.file.path}: {tensor.name} is in {tensor.kind} blocks, and a plain tensor is needed")
        read, dtype = PLAIN[tensor.kind]
        values = torch.from_numpy(self.file.blocks(tensor.name).view(read)).view(dtype).reshape(tensor.shape)
        order = self.rows(name)
        return values if order is None else values[order]


class Gguf(Packed):
    """The matrices a GGUF file holds in blocks.

    Raises:
        UnsupportedError: something else than a matrix is in blocks; names the tensor.
    """

    lead = ("weight",)

    def __init__(self, store: GgufStore) -> None:
        super().__init__(store, {})
        self._gguf = store
        for name in store.names():
            kind = store.kind(name)
            if kind in PLAIN:
                continue
            if not name.endswith(".weight") or len(store.shape(name)) != 2:
                raise UnsupportedError(
                    f"{store.file.path}: {store.own(name).name} {list(store.shape(name))} is in {kind} blocks and no matrix; "
                    "take a file that keeps it in F16 or F32"
                )
            self.schemes[name.removesuffix(".weight")] = BLOCKS[kind].scheme

    def read(self, module: str) -> QuantizedWeight:
        name = f"{module}.weight"
        quantized = quantized_blocks(self._gguf.file.blocks(self._gguf.own(name).name), self._gguf.kind(name))
        order = self._gguf.rows(name)
        return quantized if order is None else take_rows(quantized, order)


def config_changes(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers' reading of the metadata leaves out of the config: head size, biases, rows of the vocabulary and rotary
    scaling.

    Raises:
        UnsupportedError: a rotary scaling that is not understood; never dropped in silence.
    """
    changes: dict[str, Any] = {}
    if size := file.of_model("attention.key_length"):
        changes["head_dim"] = int(size)
    if "token_embd.weight" in file.tensors:
        changes["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    if file.architecture == "llama":
        changes["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        changes["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    scaling = _rotary_scaling(file)
    if scaling:
        theta = file.of_model("rope.freq_base", 10000.0)
        changes["rope_parameters"] = {**(config.get("rope_parameters") or {}), "rope_theta": float(theta), **scaling}
    return changes


def _rotary_scaling(file: GgufFile) -> dict[str, Any]:
    kind = file.of_model("rope.scaling.type", "none")
    factor = float(file.of_model("rope.scaling.factor", 1.0))
    original = file.of_model("rope.scaling.original_context_length")
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file)
    if kind == "linear" and factor != 1.0:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        length = {"original_max_position_embeddings": int(original)} if original else {}
        return {"rope_type": "yarn", "factor": factor, **length}
    if kind not in ("none", "linear"):
        raise UnsupportedError(
            f"{file.path}: rotary scaling {kind!r} is not read from GGUF; use the original model's directory"
        )
    return {}


def _llama3_scaling(file: GgufFile) -> dict[str, Any]:
    """Llama 3's scaling from the factors the file has in its place: one for each frequency, which its formula must give."""
    tensor = file.tensors[ROPE_FACTORS]
    stored = torch.from_numpy(file.blocks(tensor.name).view(np.float32)).reshape(-1)
    theta, factor = float(file.of_model("rope.freq_base", 10000.0)), float(stored.max())
    wave = 2 * torch.pi * theta ** (torch.arange(len(stored), dtype=torch.float64) / len(stored))
    low, high, length = LLAMA3.values()
    smooth = (length / wave - low) / (high - low)
    middle = 1 / ((1 - smooth) / factor + smooth)
    expected = torch.where(wave < length / high, 1.0, torch.where(wave > length / low, factor, middle))
    if not torch.allclose(expected.float(), stored, rtol=1e-4):
        raise UnsupportedError(
            f"{file.path}: {ROPE_FACTORS} holds rotary factors that Llama 3's formula does not give (factor {factor:g}); use "
            "the original model's directory"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}
