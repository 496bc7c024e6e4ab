"""What transformers makes of a GGUF file: config and tokenizer, or the whole model in float16."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from optkit.checkpoint import gguf_cache
from optkit.checkpoint.gguf_file import read_gguf
from optkit.checkpoint.gguf_source import config_changes
from optkit.checkpoint.hf import quiet
from optkit.checkpoint.modules import meta_parameters
from optkit.errors import CheckpointError, OptkitError


def write_floating(path: Path, dest: Path) -> None:
    """The whole model as a float16 directory, as transformers reads it."""
    with _reading_gguf(path):
        where, name = str(path.parent), path.name
        model: Any = AutoModelForCausalLM.from_pretrained(
            where, gguf_file=name, dtype=torch.float16, quantization_config=GgufConfig(dequantize=True)
        )
        config = _plain_config(model.config)
        with no_init_weights(), meta_parameters():
            clean: Any = type(model)(type(model.config)(**config))
        clean.load_state_dict(model.state_dict(), assign=True)
        clean.tie_weights()
        clean.config.dtype = torch.float16
        clean.generation_config = model.generation_config
        clean.save_pretrained(dest)
        AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(dest)


def write_support(path: Path, dest: Path) -> None:
    """Config, tokenizer and generation settings of a GGUF file."""
    with _reading_gguf(path):
        where, name = str(path.parent), path.name
        read = _plain_config(AutoConfig.from_pretrained(where, gguf_file=name))
        kind = CONFIG_MAPPING[read["model_type"]]
        config = kind(**{**read, **config_changes(read_gguf(path), read), "dtype": "float32"})
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[read["model_type"]]]
        config.save_pretrained(dest)
        GenerationConfig.from_model_config(config).save_pretrained(dest)
        AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(dest)


def _plain_config(config: Any) -> dict[str, Any]:
    return {k: v for k, v in config.to_dict().items() if k not in ("quantization_config", "_model_name_or_path")}


@contextlib.contextmanager
def _reading_gguf(path: Path) -> Iterator[None]:
    """transformers reads a GGUF file inside: quietly (its reader has a progress bar of its own), parsing it once.

    Raises:
        CheckpointError: it cannot. The reader checks little: a short file ends in errors of many types.
    """
    try:
        with quiet(), gguf_cache.parsed_once(), contextlib.redirect_stderr(io.StringIO()):
            yield
    except (OSError, OptkitError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}: cannot be read as GGUF ({type(error).__name__}: {reason})") from error
