"""The facts of a model (:class:`~optkit.manifest.ModelSpec`), read from its config, generation config and tokenizer files.

Cache sizes come from ``head_dim`` and ``num_key_value_heads``; ``hidden_size / num_heads`` only counts when a config has no
``head_dim``. Old spellings are resolved by the config class itself (its ``attribute_map``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from optkit.checkpoint.files import read_json
from optkit.manifest import ModelSpec

UNKNOWN_LENGTH = 2048  # of models that have no positions to run out of and do not say what they were trained for


def model_spec(config: Any, directory: Path, tied: bool) -> ModelSpec:
    """The facts of a model.

    Args:
        config: the text part's config object (attributes, not a dict).
        directory: where generation_config.json and the tokenizer's files are.
        tied: embedding and lm_head are one tensor.
    """
    heads = _number(config, "num_attention_heads", "n_heads") or 0
    kv_heads = _number(config, "num_key_value_heads", "num_kv_heads")
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1
    elif kv_heads is None:
        kv_heads = heads
    hidden = _number(config, "hidden_size", "d_model") or 0
    head_dim = (_number(config, "head_dim") or hidden // heads) if heads else 0
    generation = _json(directory / "generation_config.json")
    return ModelSpec(
        model_type=str(getattr(config, "model_type", "")),
        num_layers=_number(config, "num_hidden_layers", "n_layers", "num_layers") or 0,
        hidden_size=hidden,
        vocab_size=_number(config, "vocab_size") or 0,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_seq_len=_max_length(config, directory),
        bos_token_id=_first(getattr(config, "bos_token_id", None), generation.get("bos_token_id")),
        pad_token_id=_first(getattr(config, "pad_token_id", None), generation.get("pad_token_id")),
        eos_token_ids=_union(getattr(config, "eos_token_id", None), generation.get("eos_token_id"), _tokenizer_eos(directory)),
        sliding_window=_window(config),
        tied_embeddings=tied,
    )


def _number(config: Any, *names: str) -> int | None:
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # transformers refuses an attribute that differs by layer: the first layer's stands for it
            value = getattr(config.per_layer_config[0], name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _max_length(config: Any, directory: Path) -> int:
    own = _number(config, "max_position_embeddings", "max_seq_len", "seq_length", "max_sequence_length")
    if own:
        return int(own * _stretch(config))
    told = _json(directory / "tokenizer_config.json").get("model_max_length")
    return int(told) if isinstance(told, (int, float)) and 0 < told < 10**8 else UNKNOWN_LENGTH


def _stretch(config: Any) -> float:
    """How much further than its ``max_position_embeddings`` a rotary scaling reaches.

    Linear and dynamic scaling leave the configured number at what the model was trained for and multiply it by their factor;
    the other kinds (yarn, llama3, longrope) configure the final number and the original one beside it.
    """
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type") not in ("linear", "dynamic"):
        return 1.0
    return max(1.0, float(rope.get("factor") or 1.0))


def _window(config: Any) -> int | None:
    """The attention window of the layers that have one."""
    window = _number(config, "sliding_window", "attention_window_size")
    kinds = getattr(config, "layer_types", None)
    if getattr(config, "use_sliding_window", True) is False or (kinds and not any("sliding" in kind for kind in kinds)):
        return None
    return window or None


def _first(*values: Any) -> int | None:
    for value in values:
        if isinstance(value, (list, tuple)):
            value = value[0] if value else None
        if isinstance(value, int) and value >= 0:
            return value
    return None


def _union(*values: Any) -> tuple[int, ...]:
    found: list[int] = []
    for value in values:
        items: Iterable[Any] = value if isinstance(value, (list, tuple)) else (value,)
        found += [item for item in items if isinstance(item, int) and item >= 0 and item not in found]
    return tuple(found)


def _tokenizer_eos(directory: Path) -> int | None:
    """Id of the token that tokenizer_config.json calls ``eos_token``."""
    token = _json(directory / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        return None
    tokenizer = _json(directory / "tokenizer.json")
    for added in tokenizer.get("added_tokens") or ():
        if isinstance(added, Mapping) and added.get("content") == text:
            return added.get("id")
    with contextlib.suppress(AttributeError, TypeError):
        return tokenizer["model"]["vocab"].get(text) if "model" in tokenizer else None
    return None
