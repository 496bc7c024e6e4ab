"""A checkpoint as a model: what optkit knows of a directory, and the torch module made from it through transformers.

Two ways lead to a module. :meth:`Checkpoint.load` gives one that computes. :meth:`Checkpoint.skeleton` gives one whose
parameters are on the ``meta`` device (no memory), and :meth:`Checkpoint.tensor_for` the tensor for each of its names, read when
it is asked for: an exporter or quantizer then needs the memory of one tensor, whatever the model's size. transformers stores
some models in another layout than it runs them (experts one by one, fused projections); its own conversion rules are applied
tensor by tensor, so ``tensor_for`` gives the layout that runs.

Modules stored quantized become :class:`QuantLinear` / :class:`QuantEmbedding`, packed codes in, packed codes out. How a
quantized embedding, and one that is one tensor with lm_head, is stored is told in docs/quantized-checkpoint.md.

Besides the hooks of ``export`` this is the only file that imports transformers.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from optkit import manifest
from optkit.checkpoint import files, gguf_cache, gguf_support
from optkit.checkpoint.affine import QuantizedWeight
from optkit.checkpoint.compressed import read_quantized
from optkit.checkpoint.formats import open_packed
from optkit.checkpoint.gguf_file import read_gguf
from optkit.checkpoint.gguf_source import Gguf, GgufStore, layout_of
from optkit.checkpoint.hf import Rules, quiet
from optkit.checkpoint.modules import (
    PACKED,
    computes_linear,
    meta_parameters,
    meta_quantized,
    replace_module,
    set_tensor,
    share_weights,
    unpacked,
)
from optkit.checkpoint.packed import Dequantized, Packed
from optkit.checkpoint.quant_linear import QuantEmbedding, QuantLinear, pack_weight
from optkit.checkpoint.sources import Sources
from optkit.checkpoint.spec import model_spec
from optkit.checkpoint.store import CODES_NAME, TensorStore
from optkit.errors import CheckpointError, UnsupportedError
from optkit.manifest import ModelSpec
from optkit.scheme import QuantScheme, scheme_from_dict

__all__ = ["Checkpoint", "linears", "lm_modules", "open_checkpoint", "quiet", "replace_module"]


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Opens a HF directory, a GGUF file or a hub id. Reads config and headers, no weights.

    What is stored quantized stays so, codes and scales as they are: compressed-tensors, GPTQ, AWQ and GGUF
    (docs/quantized-checkpoint.md). A GGUF file of an architecture whose layout optkit does not know is read by transformers and
    kept as a float16 directory in the cache (:func:`files.cache_directory`).

    Raises:
        CheckpointError: missing, truncated or damaged; one line that names the file.
        UnsupportedError: an architecture transformers does not know, or weights quantized in a way optkit does not read.
    """
    path = files.locate(model)
    if path.is_file():
        return _open_gguf(str(model), path)
    return _open_directory(str(model), path)


def _open_directory(given: str, directory: Path) -> Checkpoint:
    inside = sorted(directory.glob("*.gguf"))
    if inside and not (directory / files.CONFIG).is_file():
        raise CheckpointError(f"{directory}: no {files.CONFIG} here; for the GGUF file give its own path: {inside[0]}")
    raw = files.read_json(directory / files.CONFIG)
    tensors = TensorStore.open(directory)
    stored = raw.get("quantization_config")
    packed = open_packed(stored, tensors) if stored else None
    checkpoint = Checkpoint(given, directory, _config(directory), tensors, {}, packed=packed)
    _open_packed(checkpoint)
    _open_codes(checkpoint)
    return checkpoint


def _open_gguf(given: str, path: Path) -> Checkpoint:
    file = read_gguf(path)
    layout = layout_of(file)
    if layout is None:
        return _open_directory(
            given, gguf_cache.converted(path, f"floating {transformers.__version__}", gguf_support.write_floating)
        )
    store = GgufStore(file, layout)
    packed = Gguf(store)
    directory = gguf_cache.converted(path, f"support {transformers.__version__}", gguf_support.write_support)
    checkpoint = Checkpoint(given, directory, _config(directory), store, {}, packed=packed, gguf=path)
    _open_packed(checkpoint)
    return checkpoint


def _open_packed(checkpoint: Checkpoint) -> None:
    """Takes up what the store holds quantized; an embedding tied to a head that is not stored is one tensor with it."""
    if checkpoint.packed is None or not checkpoint.packed.schemes:
        return
    sources, schemes = checkpoint.sources, checkpoint.packed.schemes
    checkpoint.quantization = {name: schemes[at] for name, at in sources.modules.items()}
    if sources.tied:
        embedding, head = lm_modules(sources.model)
        if embedding in sources.modules and head not in sources.modules and f"{head}.weight" not in sources:
            checkpoint.shared = True
            checkpoint.quantization[head] = checkpoint.quantization[embedding]


def _open_codes(checkpoint: Checkpoint) -> None:
    """Takes up the codes of modules that are stored dequantized; the directory's manifest says which."""
    folder = checkpoint.directory / CODES_NAME
    if folder.is_dir() and (checkpoint.directory / manifest.FILE_NAME).is_file():
        facts = manifest.read_manifest(checkpoint.directory, "quantized-checkpoint").facts
        checkpoint.codes = TensorStore.open(folder)
        checkpoint.quantization |= {name: scheme_from_dict(scheme) for name, scheme in facts["codes"].items()}
        if facts["tied"] == "share":
            checkpoint.shared = True
            checkpoint.quantization[facts["lm_head"]] = checkpoint.quantization[facts["embedding"]]


def _config(directory: Path) -> Any:
    try:
        with quiet():
            return AutoConfig.from_pretrained(directory, local_files_only=True)
    except ValueError as error:
        reason = " ".join(str(error).split())
        if "model type" in reason:
            raise UnsupportedError(f"{directory / files.CONFIG}: {reason[:200]}") from error
        raise CheckpointError(f"{directory / files.CONFIG}: {reason[:200]}") from error
    except Exception as error:  # config classes validate their values with errors of many types
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{directory / files.CONFIG}: not a usable config ({type(error).__name__}: {reason[:200]})"
        ) from error


@dataclass(eq=False)
class Checkpoint:
    """A directory with a model in it.

    Attributes:
        given: as the user wrote it.
        directory: where config, weights and tokenizer are.
        full_config: transformers' config object (of a multimodal model, the whole).
        tensors: the stored tensors, by their stored names.
        quantization: module name -> scheme of the modules that are quantized; empty for a floating-point checkpoint.
        shared: embedding and lm_head are one *quantized* tensor.
        codes: the codes of modules whose stored weights are dequantized (docs/quantized-checkpoint.md).
        packed: what reads the quantized weights among :attr:`tensors`; ``None`` where none are.
        gguf: the GGUF file, when the weights are one's.
    """

    given: str
    directory: Path
    full_config: Any
    tensors: TensorStore
    quantization: dict[str, QuantScheme]
    shared: bool = False
    codes: TensorStore | None = None
    packed: Packed | None = None
    gguf: Path | None = None

    @property
    def config(self) -> Any:
        """The config object of the text model."""
        return self.full_config.get_text_config()

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the content: weights, config, tokenizer."""
        own = files.content_digest(self.directory)
        return own if self.gguf is None else manifest.json_digest([own, files.cached_file_digest(self.gguf)])

    @property
    def weight_files(self) -> list[Path]:
        """The files the weights are in."""
        return sorted(self.directory.glob("*.safetensors")) if self.gguf is None else [self.gguf]

    @functools.cached_property
    def spec(self) -> ModelSpec:
        return model_spec(self.config, self.directory, self.shared or self.sources.tied)

    @functools.cached_property
    def sources(self) -> Sources:
        """Which stored tensors make which tensor of the model."""
        model = self._bare(torch.float32)
        return Sources(model, self.tensors, Rules(model), self.packed)

    def dequantized(self, dtype: torch.dtype = torch.float16) -> Checkpoint:
        """The same model with floating-point weights: each is dequantized, and rounded to ``dtype``, when it is read.

        An unquantized checkpoint is returned as it is.
        """
        if self.packed is None or not self.packed.schemes:
            return self
        return dataclasses.replace(
            self, tensors=Dequantized(self.packed, dtype), quantization={}, shared=False, codes=None, packed=None
        )

    def quantized(self, module: str) -> QuantizedWeight:
        """The codes and scales of a module in :attr:`quantization`."""
        stored = self.sources.modules.get(module)
        if stored is None and self.shared:
            stored = self.sources.modules.get(lm_modules(self.sources.model)[0])
        if stored is not None and self.packed is not None:
            return self.packed.read(stored)
        if self.codes is None:
            raise CheckpointError(f"{self.directory}: {module} is said to be quantized, and its tensors are not here")
        own = module if f"{module}.weight_scale" in self.codes else lm_modules(self.sources.model)[0]
        return read_quantized(self.codes, own, self.quantization[module])

    def skeleton(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model with every parameter (and the buffers of quantized modules) on the meta device, in eval mode.

        Other buffers, such as rotary tables, hold their values. Tied parameters are one object. Attention is ``eager``.
        """
        model = self._bare(dtype)
        self.sources.untie(model)
        for name, scheme in self.quantization.items():
            module = model.get_submodule(name)
            replace_module(model, name, meta_quantized(module, scheme, dtype, *_matrix(module)))
        if self.shared:
            share_weights(*(model.get_submodule(name) for name in lm_modules(model)))
        for name, buffer in list(model.named_buffers()):
            if not buffer.is_meta and name in self.sources:
                set_tensor(model, name, self.sources.read(name, buffer.dtype))
        return model.eval()

    def _bare(self, dtype: torch.dtype) -> nn.Module:
        """The floating-point model with its parameters on the meta device, everything tied that its config ties."""
        config = copy.deepcopy(self.full_config)
        config.__dict__.pop("quantization_config", None)
        try:
            with quiet(), no_init_weights(), meta_parameters():
                model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
                model.tie_weights()
                if dtype != torch.float32:  # tables are computed in float32 and then rounded, as from_pretrained does it
                    exact = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
                    for mine, buffer in zip(model.buffers(), exact.buffers(), strict=True):
                        mine.copy_(buffer)
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise UnsupportedError(f"{self.given}: transformers {transformers.__version__}: {reason[:200]}") from error
        rules = Rules(model)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(rules.kept_dtype(name, dtype))
        return model.eval()

    def tensor_for(self, name: str, dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
        """What reads the tensor for parameter or buffer ``name`` of ``skeleton(dtype)``, in its final layout and dtype.

        Raises:
            CheckpointError: the checkpoint has no such tensor.
        """
        module, _, leaf = name.rpartition(".")
        if module in self.quantization and leaf in PACKED:
            return functools.partial(self._packed_tensor, module, leaf, dtype)
        if name not in self.sources:
            raise CheckpointError(f"{self.directory}: has no tensor for {name}: not a complete checkpoint of this model")
        return functools.partial(self.sources.read, name, dtype)

    def _packed_tensor(self, module: str, leaf: str, dtype: torch.dtype) -> Tensor:
        quantized = self.quantized(module)
        parts = (*pack_weight(quantized), quantized.shift, quantized.input_scale)
        tensor = dict(zip(PACKED, parts, strict=True))[leaf]
        assert tensor is not None, f"{module} has no {leaf}"
        return tensor if tensor.dtype == torch.uint8 else fitted(tensor, dtype, f"{module}.{leaf}")

    def unused_tensors(self) -> list[str]:
        """Stored tensors that no parameter or buffer of the model takes."""
        return self.sources.unused

    def load(self, dtype: torch.dtype = torch.float32, packed: bool = True) -> nn.Module:
        """The model with its weights, in eval mode with eager attention.

        Args:
            dtype: of the floating-point parameters.
            packed: keep quantized modules packed, else make them ordinary linears with the dequantized weights: the same
                numbers, faster, and more memory. Modules with 8-bit activations stay as they are.

        Raises:
            CheckpointError: tensors are missing; names the first.
        """
        model = self.skeleton(dtype)
        done: dict[int, Tensor] = {}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            if tensor.is_meta:
                value = done[id(tensor)] if id(tensor) in done else self.tensor_for(name, dtype)()
                done[id(tensor)] = set_tensor(model, name, value)
        if not packed:
            self._unpack(model, dtype)
        return model

    def _unpack(self, model: nn.Module, dtype: torch.dtype) -> None:
        for name, scheme in self.quantization.items():
            module = model.get_submodule(name)
            assert isinstance(module, QuantLinear | QuantEmbedding)
            if scheme.activation_bits == 16:
                replace_module(model, name, unpacked(module, dtype))
        if self.shared:
            embedding, head = (model.get_submodule(name) for name in lm_modules(model))
            if isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear):
                head.weight = embedding.weight

    def copy_support_files(self, dest: Path, **changes: Any) -> None:
        """Writes config.json, tokenizer, chat template and generation settings into ``dest``.

        The config is the original one in both rope spellings (:func:`files.portable_config`), without ``quantization_config``.

        Args:
            dest: an existing directory.
            changes: config entries to set.
        """
        config = files.portable_config(files.read_json(self.directory / files.CONFIG))
        config.pop("quantization_config", None)
        if isinstance(config.get("text_config"), dict):
            config["text_config"].update({key: value for key, value in changes.items() if key in config["text_config"]})
        (dest / files.CONFIG).write_text(json.dumps({**config, **changes}, indent=1) + "\n", encoding="utf-8")
        files.copy_support_files(self.directory, dest)


def lm_modules(model: Any) -> tuple[str, str]:
    """Names of the token embedding and of lm_head.

    Raises:
        UnsupportedError: the model has none.
    """
    found = []
    for what, module in (("token embedding", model.get_input_embeddings()), ("lm_head", model.get_output_embeddings())):
        name = next((n for n, m in model.named_modules() if m is module), None)
        if module is None or name is None:
            raise UnsupportedError(f"{type(model).__name__} has no {what}; optkit works on language models with one")
        found.append(name)
    return found[0], found[1]


def is_transposed(module: nn.Module) -> bool:
    """Is the module's ``weight`` stored ``[I, O]``?"""
    return isinstance(module, Conv1D)


def _matrix(module: Any) -> tuple[int, int]:
    """``(O, I)`` of a linear, Conv1D or embedding."""
    rows, columns = module.weight.shape
    return (columns, rows) if isinstance(module, Conv1D) else (rows, columns)


def linears(model: Any) -> dict[str, tuple[int, int]]:
    """Module name -> ``(out_features, in_features)`` of every linear layer except lm_head, in model order.

    A linear layer is an ``nn.Linear`` (or transformers' ``Conv1D``, whose weight is transposed) that computes what its class
    does.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {name: _matrix(module) for name, module in model.named_modules() if _is_linear(module) and module is not head}


def _is_linear(module: Any) -> bool:
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward or computes_linear(module)
    return isinstance(module, Conv1D)


def fitted(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Scales or shifts in ``dtype``.

    Raises:
        UnsupportedError: one overflows there, or becomes zero.
    """
    cast = tensor.to(dtype)
    if not bool(cast.isfinite().all()) or bool(((cast == 0) & (tensor != 0)).any()):
        peak, least = tensor.abs().max(), tensor[tensor != 0].abs().min()
        raise UnsupportedError(
            f"{name}: values from {least:.3g} to {peak:.3g} do not fit {str(dtype).removeprefix('torch.')}; use float32"
        )
    return cast
