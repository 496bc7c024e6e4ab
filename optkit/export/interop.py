"""``genai_config.json``: lets onnxruntime-genai run the artifact's directory as it is.

onnxruntime-genai feeds ``input_ids``, ``attention_mask`` and the caches by name and shares one buffer between past and
present, which is exactly the ``slots`` contract. It sizes the logits itself, by the graph's declared shape: ``[B, S, V]``
unless the middle one is 1. So
``model_genai.onnx`` is the same graph over the same weights file with ``logits_positions`` fixed to the last one and that shape
declared. Its generic model type is ``decoder``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx

from optkit import io_spec
from optkit.io_spec import GraphSpec
from optkit.manifest import ModelSpec

FILE = "genai_config.json"
GRAPH_FILE = "model_genai.onnx"


def genai_config(spec: GraphSpec, model: ModelSpec, file_name: str) -> dict[str, Any] | None:
    """The configuration, or ``None`` for a graph onnxruntime-genai cannot feed (another layout, recurrent state)."""
    if spec.layout != "slots" or spec.recurrent or any(c.role not in ("key", "value") for c in spec.caches):
        return None
    keys = [c for c in spec.caches if c.role == "key"]
    if len({(c.shape[1], c.shape[3]) for c in spec.caches}) != 1 or [c.layer for c in keys] != list(range(len(keys))):
        return None
    eos: Any = list(model.eos_token_ids) or [model.vocab_size - 1]
    entries = dict([io_spec.EXACT_INT8]) if spec.int8_activations else {}
    decoder = {
        "session_options": {"log_id": "optkit", "provider_options": [], **entries},
        "filename": file_name,
        "head_size": keys[0].shape[3],
        "hidden_size": model.hidden_size,
        "inputs": {
            "input_ids": io_spec.INPUT_IDS,
            "attention_mask": io_spec.ATTENTION_MASK,
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": io_spec.LOGITS,
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
        "num_attention_heads": model.num_heads,
        "num_hidden_layers": len(keys),
        "num_key_value_heads": keys[0].shape[1],
    }
    return {
        "model": {
            "type": "decoder",
            "bos_token_id": model.bos_token_id if model.bos_token_id is not None else eos[0],
            "eos_token_id": eos if len(eos) > 1 else eos[0],
            "pad_token_id": model.pad_token_id if model.pad_token_id is not None else eos[0],
            "context_length": spec.max_seq_len,
            "vocab_size": model.vocab_size,
            "decoder": decoder,
        },
        "search": {
            "do_sample": False,
            "early_stopping": True,
            "max_length": spec.max_seq_len,
            "min_length": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": True,
            "temperature": 1.0,
            "top_k": 1,
            "top_p": 1.0,
        },
    }


def write_genai_config(directory: Path, spec: GraphSpec, model: ModelSpec, file_name: str) -> bool:
    """Writes the configuration and its graph if the model can be run that way; says whether."""
    config = genai_config(spec, model, GRAPH_FILE)
    if config is None:
        return False
    graph = onnx.load(str(directory / file_name), load_external_data=False)
    inputs = [value for value in graph.graph.input if value.name != io_spec.LOGITS_POSITIONS]
    del graph.graph.input[:]
    graph.graph.input.extend(inputs)
    for output in graph.graph.output:
        if output.name == io_spec.LOGITS:
            middle = output.type.tensor_type.shape.dim[1]
            middle.Clear()
            middle.dim_value = 1
    onnx.save(graph, str(directory / GRAPH_FILE))
    (directory / FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return True
