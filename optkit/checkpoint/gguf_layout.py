"""What llama.cpp calls the tensors of an architecture and how it lays them out: read by gguf_source.py, written by
export/gguf.py.

An architecture's name is part of the file format, so this is the one table of names in optkit. Two things differ from the
Hugging Face layout: ``llama`` files have the rows of q and k reordered for a rotary embedding of neighbouring pairs
(``[head, half, pair] -> [head, pair, half]``), and Gemma's norms hold ``1 + w``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Layout:
    """One architecture of llama.cpp's.

    Attributes:
        architecture: its name in the file.
        interleaved: rows of q and k are reordered.
        norm_offset: added to norm weights.
        block: the file's name of a layer's tensor -> the Hugging Face one.
    """

    architecture: str
    interleaved: bool = False
    norm_offset: float = 0.0
    block: Mapping[str, str] = field(default_factory=lambda: dict(_BLOCK))

    def hf_name(self, name: str) -> str | None:
        """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; ``None`` for a tensor it has no name for."""
        stem, _, leaf = name.rpartition(".")
        if stem in _OUTSIDE:
            return f"{_OUTSIDE[stem]}.{leaf}"
        parts = stem.split(".")
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in self.block:
            return f"model.layers.{parts[1]}.{self.block[parts[2]]}.{leaf}"
        return None

    def gguf_name(self, name: str) -> str | None:
        """The inverse of :meth:`hf_name`."""
        stem, _, leaf = name.rpartition(".")
        outside = {hf: own for own, hf in _OUTSIDE.items()}
        if stem in outside:
            return f"{outside[stem]}.{leaf}"
        parts = stem.split(".", 3)
        inside = {hf: own for own, hf in self.block.items()}
        if len(parts) == 4 and parts[:2] == ["model", "layers"] and parts[3] in inside:
            return f"blk.{parts[2]}.{inside[parts[3]]}.{leaf}"
        return None

    def heads_of(self, name: str, heads: int, kv_heads: int) -> int | None:
        """Heads whose rows are reordered in the tensor ``name`` (the file's), or ``None``."""
        own = name.split(".")[-2] if self.interleaved and name.startswith("blk.") else ""
        return {"attn_q": heads, "attn_k": kv_heads}.get(own)


READ = {
    "llama": Layout("llama", interleaved=True),
    "qwen2": Layout("qwen2"),
    "qwen3": Layout("qwen3"),
}
#: Hugging Face's ``model_type`` -> the layout such a model is written in
WRITTEN = {"llama": READ["llama"], "mistral": READ["llama"], "qwen2": READ["qwen2"], "qwen3": READ["qwen3"]}


def file_rows(rows: int, heads: int) -> Tensor:
    """``hf[file_rows(...)]`` are the rows in the file's order, int64 ``[rows]``."""
    return torch.arange(rows).reshape(heads, 2, -1).transpose(1, 2).reshape(-1)


def hf_rows(rows: int, heads: int) -> Tensor:
    """``file[hf_rows(...)]`` are the rows in the Hugging Face order, int64 ``[rows]``."""
    return torch.arange(rows).reshape(heads, -1, 2).transpose(1, 2).reshape(-1)
