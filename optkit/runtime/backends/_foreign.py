"""Another exporter's ONNX model: what optkit's manifest would say, read from ``config.json`` and the graph's own inputs.

optimum, transformers.js and transformers' exporter write a growing cache under the names of ``io_spec``; their attention
mask is padded on the left. Nothing is guessed beyond that: a graph with other inputs is refused with their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optkit import io_spec
from optkit.errors import ArtifactError, UnsupportedError
from optkit.io_spec import CacheSpec, GraphSpec
from optkit.manifest import ModelSpec

KNOWN_INPUTS = (io_spec.INPUT_IDS, io_spec.ATTENTION_MASK, io_spec.POSITION_IDS)
DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int8)": "int8"}


def foreign_model(directory: Path) -> ModelSpec:
    """The model's facts from ``config.json`` and ``generation_config.json``.

    Raises:
        ArtifactError: no config, or one without vocabulary and layers.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ArtifactError(f"{directory}: has a model.onnx, but neither optkit.json nor config.json to say what it is")
    config = json.loads(path.read_text(encoding="utf-8"))
    generation = directory / "generation_config.json"
    defaults = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
    try:
        heads = _first(config, "num_attention_heads", "n_head")
        hidden = _first(config, "hidden_size", "n_embd")
        return ModelSpec(
            model_type=str(config.get("model_type", "unknown")),
            num_layers=_first(config, "num_hidden_layers", "n_layer"),
            hidden_size=hidden,
            vocab_size=_first(config, "vocab_size"),
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            max_seq_len=_first(config, "max_position_embeddings", "n_positions"),
            bos_token_id=config.get("bos_token_id"),
            pad_token_id=config.get("pad_token_id"),
            eos_token_ids=tuple(sorted({*_ids(config.get("eos_token_id")), *_ids(defaults.get("eos_token_id"))})),
        )
    except KeyError as error:
        raise ArtifactError(f"{path}: has no {error.args[0]}, so the model cannot be run") from error


def foreign_graph(inputs: Sequence[tuple[str, Sequence[Any], str]], spec: ModelSpec) -> GraphSpec:
    """The contract of a graph with a growing cache.

    Args:
        inputs: (name, shape, type) of its inputs, as ONNX Runtime reports them.
        spec: from :func:`foreign_model`.

    Raises:
        UnsupportedError: inputs that this contract does not know.
    """
    caches = []
    for name, shape, kind in inputs:
        match = re.fullmatch(r"past_key_values\.(\d+)\.(key|value)", name)
        if match is None:
            if name not in KNOWN_INPUTS:
                known = ", ".join(KNOWN_INPUTS)
                raise UnsupportedError(
                    f"graph input {name!r}: of other exporters' inputs {known} and past_key_values.* are understood"
                )
            continue
        if kind not in DTYPES:
            raise UnsupportedError(f"graph input {name!r} has type {kind}: a cache of {', '.join(DTYPES)} is understood")
        sizes = tuple(None if axis == 0 or not isinstance(size, int) else size for axis, size in enumerate(shape))
        caches.append(CacheSpec(int(match[1]), match[2], sizes, DTYPES[kind]))
    if not caches:
        raise UnsupportedError("this graph has no past_key_values inputs: export it with a cache (text-generation-with-past)")
    return GraphSpec("growing", tuple(caches), "float32", spec.max_seq_len, optional_logits_positions=False)


def _first(config: dict[str, Any], *names: str) -> int:
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    raise KeyError(names[0])


def _ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)
