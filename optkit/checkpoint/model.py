"""A checkpoint as a model: what optkit knows of a directory, and the torch module made from it through transformers.

Two ways lead to a module. :meth:`Checkpoint.load` gives one that computes. :meth:`Checkpoint.skeleton` gives one whose
parameters are on the ``meta`` device (no memory), and :meth:`Checkpoint.tensor_for` the tensor for each of its names, read when
it is asked for: an exporter or quantizer then needs the memory of one tensor, whatever the model's size. transformers stores
some models in another layout than it runs them (experts one by one, fused projections); its own conversion rules are applied
tensor by tensor, so ``tensor_for`` gives the layout that runs.

Modules stored quantized become :class:`QuantLinear` / :class:`QuantEmbedding`, packed codes in, packed codes out. How a
quantized embedding, and one that is one tensor with lm_head, is stored is told in docs/quantized-checkpoint.md.

This is one of two files that import transformers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from optkit import manifest
from optkit.checkpoint import files
from optkit.checkpoint.affine import QuantizedWeight
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
from optkit.checkpoint.quant_linear import QuantEmbedding, QuantLinear, pack_weight
from optkit.checkpoint.spec import model_spec
from optkit.checkpoint.store import CODES_NAME, TensorStore, read_quantized, storable, stored_schemes
from optkit.errors import CheckpointError, OptkitError, UnsupportedError, storage_errors
from optkit.manifest import ModelSpec
from optkit.scheme import QuantScheme, scheme_from_dict

__all__ = ["Checkpoint", "linears", "lm_modules", "open_checkpoint", "quiet", "replace_module"]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers' progress bars, reports and warnings off the terminal."""
    log, bars = transformers.utils.logging, transformers.utils.logging.is_progress_bar_enabled()
    verbosity = log.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Opens a HF directory, a GGUF file or a hub id. Reads config and safetensors headers, no weights.

    A GGUF file is converted to a float16 directory once, in the cache (:func:`files.cache_directory`).

    Raises:
        CheckpointError: missing, truncated or damaged; one line that names the file.
        UnsupportedError: an architecture transformers does not know, or weights quantized in a way optkit does not read.
    """
    path = files.locate(model)
    directory = convert_gguf(path) if path.is_file() else path
    raw = files.read_json(directory / files.CONFIG)
    tensors = TensorStore.open(directory)
    stored = raw.get("quantization_config")
    checkpoint = Checkpoint(str(model), directory, _config(directory), tensors, {})
    if stored:
        schemes = stored_schemes(stored, tensors)
        checkpoint.quantization = {name: schemes[at] for name, at in checkpoint.sources.modules.items()}
    _open_codes(checkpoint)
    return checkpoint


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
    """

    given: str
    directory: Path
    full_config: Any
    tensors: TensorStore
    quantization: dict[str, QuantScheme]
    shared: bool = False
    codes: TensorStore | None = None

    @property
    def config(self) -> Any:
        """The config object of the text model."""
        return self.full_config.get_text_config()

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the content: weights, config, tokenizer."""
        return files.content_digest(self.directory)

    @functools.cached_property
    def spec(self) -> ModelSpec:
        return model_spec(self.config, self.directory, self.shared or self.sources.tied)

    @functools.cached_property
    def sources(self) -> Sources:
        """Which stored tensors make which tensor of the model."""
        return Sources(self._bare(torch.float32), self.tensors)

    def quantized(self, module: str) -> QuantizedWeight:
        """The codes and scales of a module in :attr:`quantization`."""
        stored = self.sources.modules.get(module)
        if stored is not None:
            return read_quantized(self.tensors, stored, self.quantization[module])
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
        kept = model._get_dtype_plan(dtype)
        pattern = build_glob_alternation(list(kept))[0] if kept else None
        for name, parameter in model.named_parameters():
            if pattern is not None and pattern.search(name):
                parameter.data = parameter.data.to(torch.float32)
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
        tensor = dict(zip(PACKED, (*pack_weight(quantized), quantized.input_scale), strict=True))[leaf]
        assert tensor is not None, f"{module} has no {leaf}"
        return storable(tensor, dtype) if leaf in ("weight_scale", "input_scale") else tensor

    def unused_tensors(self) -> list[str]:
        """Stored tensors that no parameter or buffer of the model takes."""
        return self.sources.unused

    def load(self, dtype: torch.dtype = torch.float32, packed: bool = True) -> nn.Module:
        """The model with its weights, in eval mode with eager attention.

        Args:
            dtype: of the floating-point parameters.
            packed: keep quantized modules packed, else make them ordinary linears with the dequantized weights (8-bit
                activations are then not imitated).

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
        for name in self.quantization:
            module = model.get_submodule(name)
            assert isinstance(module, QuantLinear | QuantEmbedding)
            replace_module(model, name, unpacked(module, dtype))
        if self.shared:
            embedding, head = (model.get_submodule(name) for name in lm_modules(model))
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


class Sources:
    """Which stored tensors make which parameter, by transformers' own renaming and conversion rules for the model.

    Attributes:
        model: the model on the meta device, as its config makes it.
        modules: module name -> name it is stored under, of the modules stored quantized.
        unused: stored tensors that nothing takes.
        tied: embedding and lm_head are one parameter.
    """

    def __init__(self, model: Any, store: TensorStore) -> None:
        self.model, self._store = model, store
        self._direct: dict[str, str] = {}
        self._converted: dict[str, tuple[WeightConverter, list[tuple[str, str]]]] = {}
        self._part_of: dict[str, str] = {}
        self.modules: dict[str, str] = {}
        self.unused: list[str] = []
        with quiet():
            self._collect(get_model_conversion_mapping(model))
        self._tie()

    def _collect(self, rules: list[Any]) -> None:
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        state, prefix = self.model.state_dict(), self.model.base_model_prefix
        for key in sorted(self._store.names(), key=dot_natural_key):
            base, _, leaf = key.rpartition(".")
            quantized = f"{base}.weight_scale" in self._store
            if quantized and leaf not in ("weight_packed", "weight"):
                continue
            own = f"{base}.weight" if quantized else key
            name, pattern = rename_source_key(own, renamings, converters, prefix, state)
            if name not in state:
                name, pattern = rename_source_key(own, [], [], prefix, state)
            if name not in state:
                self.unused.append(key)
            elif quantized:
                self.modules[name.removesuffix(".weight")] = base
            elif pattern is None:
                self._direct[name] = key
            else:
                rule = by_pattern[pattern]
                self._converted.setdefault(name, (rule, []))[1].append((key, pattern))
                first, *others = rule.target_patterns
                self._part_of.update({name.replace(first, other): name for other in (first, *others)})

    def _tie(self) -> None:
        """Names of one tied parameter lead to the one that is stored; two that are stored with different values are not
        tied."""
        self._untied: list[str] = []
        for target, source in self.model.all_tied_weights_keys.items():
            stored = [name for name in (target, source) if self._stored(name)]
            if len(stored) == 1:
                self._direct_alias(stored[0], target if stored[0] == source else source)
            elif len(stored) == 2 and not torch.equal(self.read(target), self.read(source)):
                self._untied.append(target)
        ends = [get() for get in (self.model.get_input_embeddings, self.model.get_output_embeddings)]
        same = None not in ends and ends[0].weight is ends[1].weight
        names = {name for name, p in self.model.named_parameters(remove_duplicate=False) if same and p is ends[1].weight}
        self.tied = same and not names & set(self._untied)

    def _stored(self, name: str) -> bool:
        return name in self._direct or name in self._part_of

    def _direct_alias(self, stored: str, name: str) -> None:
        if stored in self._direct:
            self._direct[name] = self._direct[stored]
        else:
            self._part_of[name] = self._part_of[stored]

    def untie(self, model: nn.Module) -> None:
        """Gives parameters that the config ties, and whose stored values differ, an object of their own."""
        for name in self._untied:
            set_tensor(model, name, nn.Parameter(model.get_parameter(name).data.clone(), requires_grad=False))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._stored(name)

    def units(self) -> Iterator[tuple[list[str], list[str]]]:
        """``(stored tensors, the model's names made from them)``, one by one; a single stored tensor is taken as it is."""
        takers: dict[str, list[str]] = {}
        for name, key in self._direct.items():
            takers.setdefault(key, []).append(name)
        yield from (([key], names) for key, names in takers.items())
        for first, (_, keys) in self._converted.items():
            yield [key for key, _ in keys], [name for name, start in self._part_of.items() if start == first]

    def stored_key(self, name: str) -> str | None:
        """The stored tensor that is ``name`` as it is, or ``None`` if it takes a conversion."""
        return self._direct.get(name)

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tensor of ``name``, floating point as ``dtype`` (float32 where the model keeps that)."""
        kept = self.model._get_dtype_plan(dtype)
        if kept and build_glob_alternation(list(kept))[0].search(name):
            dtype = torch.float32
        if name in self._direct:
            return _cast(self._store.get(self._direct[name]), dtype)
        first = self._part_of[name]
        rule, keys = self._converted[first]
        rule = copy.deepcopy(rule)
        for key, pattern in keys:
            reader: Any = functools.partial(self._read_cast, key, dtype)
            rule.add_tensor(first, key, pattern, reader)
        with quiet():
            made = rule.convert(first, model=self.model, config=self.model.config)
        value = made[name]
        return value[0] if isinstance(value, list) else value

    def _read_cast(self, key: str, dtype: torch.dtype) -> Tensor:
        return _cast(self._store.get(key), dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


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


def convert_gguf(path: Path) -> Path:
    """The float16 HF directory made of a GGUF file; made once, then found in the cache by the file's content.

    Raises:
        CheckpointError: not a GGUF file, truncated, or of an architecture transformers cannot read from GGUF.
    """
    with open(path, "rb") as handle:
        if handle.read(4) != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file; download or copy it again")
    key = manifest.json_digest([files.cached_file_digest(path), transformers.__version__])[:32]
    final = files.cache_directory() / "gguf" / key
    if (final / files.CONFIG).is_file():
        return final
    with storage_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=final.parent))
        try:
            _write_gguf(path, staging)
            staging.chmod(0o755)
            with contextlib.suppress(OSError):  # another process was first: its directory is as good
                os.rename(staging, final)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return final


def _write_gguf(path: Path, dest: Path) -> None:
    where, name = str(path.parent), path.name
    try:
        with quiet(), contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader has a progress bar of its own
            tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
            model: Any = AutoModelForCausalLM.from_pretrained(
                where, gguf_file=name, dtype=torch.float16, quantization_config=GgufConfig(dequantize=True)
            )
            config = {
                k: v for k, v in model.config.to_dict().items() if k not in ("quantization_config", "_model_name_or_path")
            }
            with no_init_weights(), meta_parameters():
                clean: Any = type(model)(type(model.config)(**config))
            clean.load_state_dict(model.state_dict(), assign=True)
            clean.tie_weights()
            clean.config.dtype = torch.float16
            clean.generation_config = model.generation_config
            clean.save_pretrained(dest)
            tokenizer.save_pretrained(dest)
    except (OSError, OptkitError):
        raise
    except Exception as error:  # the GGUF reader checks little: a short file ends in errors of many types
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}: cannot be read as GGUF ({type(error).__name__}: {reason})") from error
