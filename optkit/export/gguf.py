"""Target ``gguf``: a file for llama.cpp with the checkpoint's own codes.

4 bits symmetric become Q4_0 blocks, asymmetric Q4_1, 8 bits symmetric Q8_0, code by code (gguf_blocks.py); other matrices are
stored in the type asked for (F32, F16, BF16), vectors in F32, as llama.cpp wants them. Rows of q and k get the file's order
(gguf_layout.py). Tensors are written one after the other as they are read.

An architecture is a name in this format, so unlike every other target this one has a list of them
(:data:`~optkit.checkpoint.gguf_layout.WRITTEN`); and of those it refuses whatever the format does not say: windows, other
activations, rotary scaling it has no keys for.

The written file is opened again as a checkpoint, config and all, and has to answer like the model it was made from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optkit.checkpoint.affine import take_rows
from optkit.checkpoint.gguf_blocks import SIZES, block_type, to_blocks
from optkit.checkpoint.gguf_layout import WRITTEN, Layout, file_rows
from optkit.checkpoint.model import Checkpoint, lm_modules, open_checkpoint
from optkit.errors import DependencyError, UnsupportedError, UsageError, VerificationError, storage_errors
from optkit.export.gguf_vocabulary import vocabulary
from optkit.export.graph import untouched_reference
from optkit.export.trace import Reference
from optkit.recipe import ExportRecipe

MODEL_FILE = "model.gguf"
PLAIN = {"fp32": ("F32", torch.float32), "fp16": ("F16", torch.float16), "bf16": ("BF16", torch.bfloat16)}
ROPE_FACTORS = "rope_freqs.weight"
EXACT, ROUNDED = 2e-5, 2e-2  # of the logit range: nothing was rounded, or something was
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}  # general.file_type


@dataclass
class Entry:
    """A tensor to be written.

    Attributes:
        name: the file's.
        source: the model's parameter.
        kind: GGUF's name of the type.
        shape: ``[O, I]`` or ``[N]``.
        order: the rows in the file's order, or ``None``.
        packed: its codes are taken as they are.
    """

    name: str
    source: str
    kind: str
    shape: tuple[int, ...]
    order: Tensor | None = None
    packed: bool = False

    @property
    def bytes_shape(self) -> tuple[int, ...]:
        elements, size = SIZES[self.kind]
        return (*self.shape[:-1], self.shape[-1] // elements * size)


def write_gguf(checkpoint: Checkpoint, settings: ExportRecipe, staging: Path, report: Callable[[str], None]) -> dict[str, Any]:
    """Writes ``model.gguf`` into ``staging``; returns the facts for the manifest.

    Raises:
        UnsupportedError, UsageError: before anything is written.
        VerificationError: the file does not answer like the model.
        DependencyError: the gguf library is missing.
    """
    layout = check_written(checkpoint, settings)
    entries, extra = plan_tensors(checkpoint, layout, settings.dtype)
    described = {**metadata(checkpoint, layout, settings), **{f"tokenizer.{k}": v for k, v in _vocabulary(checkpoint).items()}}
    kinds = Counter(entry.kind for entry in entries if len(entry.shape) == 2)
    described["general.file_type"] = FILE_TYPES[kinds.most_common(1)[0][0]]
    report("reference")
    reference = untouched_reference(checkpoint, torch.float32)
    report("write")
    rounded = _write(staging / MODEL_FILE, layout.architecture, described, entries, extra, checkpoint)
    report("verify")
    verified = verify_file(staging / MODEL_FILE, reference, rounded)
    return {"target": "gguf", "model_file": MODEL_FILE, "types": dict(kinds), "rounded": rounded, "verified": verified}


def check_written(checkpoint: Checkpoint, settings: ExportRecipe) -> Layout:
    """Refuses what the format or llama.cpp cannot say.

    Raises:
        UnsupportedError, UsageError.
    """
    config, spec = checkpoint.config, checkpoint.spec
    layout = WRITTEN.get(spec.model_type)
    if layout is None:
        raise UnsupportedError(
            f"target gguf: model_type {spec.model_type!r} has no layout here; written are {', '.join(WRITTEN)}"
        )
    if settings.opset is not None or settings.chunks:
        raise UsageError("target gguf is no ONNX graph: opset and chunks do not go with it")
    length, longest = settings.max_seq_len, spec.max_seq_len
    if length is not None and length > longest:
        raise UsageError(f"max_seq_len {length}: the model has {longest} positions; ask for at most that")
    if spec.sliding_window and spec.sliding_window < spec.max_seq_len:
        raise UnsupportedError(
            f"target gguf: a window of {spec.sliding_window} tokens has no place in llama.cpp's {layout.architecture} graph"
        )
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedError(f"target gguf: activation {config.hidden_act}; llama.cpp's {layout.architecture} graph has silu")
    if spec.head_dim * spec.num_heads != spec.hidden_size and layout.architecture == "qwen2":
        raise UnsupportedError("target gguf: llama.cpp's qwen2 takes no head_dim of its own")
    return layout


def plan_tensors(checkpoint: Checkpoint, layout: Layout, dtype: str) -> tuple[list[Entry], dict[str, Tensor]]:
    """What is written, in the model's order, and tensors that are no parameter of the model.

    Raises:
        UnsupportedError: a parameter the architecture has no name for, or codes that no block type holds.
    """
    model, spec, entries = checkpoint.sources.model, checkpoint.spec, []
    tied_head = f"{lm_modules(model)[1]}.weight" if spec.tied_embeddings else None
    for source, parameter in model.named_parameters(remove_duplicate=False):
        if source == tied_head:
            continue
        name = layout.gguf_name(source)
        if name is None:
            raise UnsupportedError(f"target gguf: llama.cpp's {layout.architecture} has no tensor for {source}")
        module, _, leaf = source.rpartition(".")
        packed = leaf == "weight" and module in checkpoint.quantization
        shape = tuple(parameter.shape)
        if packed:
            try:
                kind = block_type(checkpoint.quantization[module], shape[1])
            except UnsupportedError as error:
                raise UnsupportedError(f"target gguf: {module}: {error}") from error
        else:
            kind = PLAIN[dtype][0] if len(shape) == 2 else "F32"
        count = layout.heads_of(name, spec.num_heads, spec.num_kv_heads)
        entries.append(Entry(name, source, kind, shape, None if count is None else file_rows(shape[0], count), packed))
    return entries, _rope_factors(checkpoint)


def _rope(checkpoint: Checkpoint) -> dict[str, Any]:
    return dict(getattr(checkpoint.config, "rope_parameters", None) or {})


def _rope_factors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Llama 3's scaling, which the format has as a divisor for each frequency."""
    rope = _rope(checkpoint)
    if rope.get("rope_type", "default") != "llama3":
        return {}
    size = checkpoint.spec.head_dim
    plain = float(rope["rope_theta"]) ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    tables = [b for n, b in checkpoint.skeleton().named_buffers() if n.rpartition(".")[2] == "inv_freq"]
    return {ROPE_FACTORS: (plain / tables[0].double()).float()}


def metadata(checkpoint: Checkpoint, layout: Layout, settings: ExportRecipe) -> dict[str, Any]:
    """The file's entries about the model.

    Raises:
        UnsupportedError: rotary scaling that has no keys.
    """
    config, spec, own = checkpoint.config, checkpoint.spec, layout.architecture
    rope = _rope(checkpoint)
    kind = rope.get("rope_type", "default")
    known = {
        "default": set(),
        "linear": {"factor"},
        "yarn": {"factor", "original_max_position_embeddings"},
        "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    }
    beyond = set(rope) - {"rope_type", "rope_theta", *known.get(kind, ())}
    if kind not in known or beyond or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError(f"target gguf: rotary scaling {kind} {sorted(beyond)} has no keys in the format")
    length = min(settings.max_seq_len or spec.max_seq_len, spec.max_seq_len)
    values: dict[str, Any] = {
        f"{own}.context_length": length,
        f"{own}.embedding_length": spec.hidden_size,
        f"{own}.block_count": spec.num_layers,
        f"{own}.feed_forward_length": config.intermediate_size,
        f"{own}.vocab_size": spec.vocab_size,
        f"{own}.attention.head_count": spec.num_heads,
        f"{own}.attention.head_count_kv": spec.num_kv_heads,
        f"{own}.attention.key_length": spec.head_dim,
        f"{own}.attention.value_length": spec.head_dim,
        f"{own}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{own}.rope.dimension_count": spec.head_dim,
        f"{own}.rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }
    if kind in ("linear", "yarn"):
        values |= {f"{own}.rope.scaling.type": kind, f"{own}.rope.scaling.factor": float(rope["factor"])}
        if original := rope.get("original_max_position_embeddings"):
            values[f"{own}.rope.scaling.original_context_length"] = int(original)
    return values


def _vocabulary(checkpoint: Checkpoint) -> dict[str, Any]:
    if checkpoint.gguf is None:
        return vocabulary(checkpoint.directory, checkpoint.spec)
    from optkit.checkpoint.gguf_file import read_gguf  # its own tokenizer, word for word

    return {
        k.removeprefix("tokenizer."): v for k, v in read_gguf(checkpoint.gguf).metadata.items() if k.startswith("tokenizer.")
    }


def _write(
    path: Path,
    architecture: str,
    described: dict[str, Any],
    entries: list[Entry],
    extra: dict[str, Tensor],
    checkpoint: Checkpoint,
) -> int:
    """Writes the file; returns how many values were rounded."""
    try:
        import gguf
    except ImportError as error:
        raise DependencyError("writing a GGUF file needs the gguf library: pip install optkit[export]") from error
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in described.items():
        _add(writer, key, value)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, tensor in extra.items():
        writer.add_tensor_info(name, tuple(tensor.shape), np.dtype(np.float32), tensor.numel() * 4)
    for entry in entries:
        kind, size = gguf.GGMLQuantizationType[entry.kind], int(np.prod(entry.bytes_shape))
        writer.add_tensor_info(entry.name, entry.bytes_shape, np.dtype(np.uint8), size, kind)
    rounded = 0
    with storage_errors(path):
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in extra.values():
                writer.write_tensor_data(tensor.numpy())
            for entry in entries:
                data, count = _bytes(checkpoint, entry)
                rounded += count
                writer.write_tensor_data(data)
        finally:
            writer.close()
    return rounded


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _bytes(checkpoint: Checkpoint, entry: Entry) -> tuple[np.ndarray, int]:
    """The bytes of a tensor, uint8 in the shape of :attr:`Entry.bytes_shape`, and how many of its values were rounded."""
    if entry.packed:
        quantized = checkpoint.quantized(entry.source.rpartition(".")[0])
        return to_blocks(quantized if entry.order is None else take_rows(quantized, entry.order))
    dtype = next(dtype for kind, dtype in PLAIN.values() if kind == entry.kind)
    exact = checkpoint.tensor_for(entry.source, torch.float32)()
    exact = exact if entry.order is None else exact[entry.order]
    stored = exact.to(dtype).contiguous()
    if not bool(stored.isfinite().all()):
        raise UnsupportedError(f"{entry.source} has values beyond {dtype}; use --dtype bf16 or fp32")
    return stored.view(torch.uint8).numpy().reshape(entry.bytes_shape), int((stored.float() != exact).sum())


def verify_file(path: Path, wanted: Reference, rounded: int) -> dict[str, Any]:
    """Compares the written file, opened as a checkpoint, with the model.

    Raises:
        VerificationError: it answers otherwise.
    """
    found = untouched_reference(open_checkpoint(path), torch.float32)
    limit = ROUNDED if rounded else EXACT
    error = max(float((a - b).abs().max()) for a, b in zip(found.logits, wanted.logits, strict=True)) / wanted.scale
    if not error <= limit:
        raise VerificationError(
            f"the written file's logits differ from the model's by {error:.1e} of their range (limit {limit:.0e}); "
            "nothing was written"
        )
    return {"logit_error": {"alone": error}, "limit": limit, "rows": [len(row) for row in wanted.rows]}
