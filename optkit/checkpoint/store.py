"""Tensors on disk: reading safetensors shards one tensor at a time, writing shards, and the compressed-tensors layout.

A safetensors file is ``u64 n``, ``n`` bytes of JSON (name -> dtype, shape, byte range) and the data. The header is read and
checked against the file's size when a store is opened, so a truncated download is an error with the file's name, and not a
crash in the middle of a conversion. A tensor is read into memory of its own, without a map of the file: reading a 100 GB
checkpoint tensor by tensor costs the largest tensor.

Quantized linears are stored as the ``compressed-tensors`` library stores them, with ``code`` unsigned as in scheme.py:

``pack-quantized``
    ``weight_packed`` int32 ``[O, ceil(I*b/32)]`` (packing.py, ``int32``), ``weight_scale`` ``[O, G]``, ``weight_shape`` int64
    ``[2]``, and when asymmetric ``weight_zero_point`` int32 ``[ceil(O*b/32), G]``.
``int-quantized``
    w8a8: ``weight`` int8 ``[O, I]`` (``code - 128``), ``weight_scale`` ``[O, 1]`` and, when calibrated, ``input_scale``
    ``[1]``.

Scales keep their sign: the library computes ``(code - zero_point) * scale`` and never looks at it. It does so in the scale's
type, so symmetric scales are float16, in which the product is exact for 4 bits (affine.py), and asymmetric ones, for which it
is not, float32.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from optkit import packing
from optkit.checkpoint.affine import SCALE_DTYPE, QuantizedWeight
from optkit.errors import CheckpointError, UnsupportedError
from optkit.scheme import QuantScheme

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CODES_NAME = "codes"  # folder beside the weights, see docs/quantized-checkpoint.md
SHARD_BYTES = 512 * 2**20
HEADER_LIMIT = 100 * 10**6  # the format's own limit

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: ``begin`` and ``end`` are absolute byte offsets in ``file``."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file.

    Raises:
        CheckpointError: missing, truncated, or not a safetensors file; names the file.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_LIMIT):
                raise CheckpointError(f"{path}: truncated, or not a safetensors file ({size} bytes); download or copy it again")
            header = json.loads(handle.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: its safetensors header is damaged ({error}); download or copy it again") from error
    entries = {}
    for name, item in header.items():
        if name != "__metadata__":
            entries[name] = _entry(path, name, item, 8 + length)
    end = max((entry.end for entry in entries.values()), default=8 + length)
    if end > size:
        raise CheckpointError(f"{path}: truncated: {size} bytes, and its header describes {end}; download or copy it again")
    return entries


def _entry(path: Path, name: str, item: Any, data: int) -> Entry:
    try:
        dtype, shape, (begin, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: its safetensors header is damaged at {name}; download or copy it again") from error
    if dtype not in DTYPES:
        raise UnsupportedError(f"{path}: tensor {name} has the data type {dtype}, which optkit does not read")
    if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise CheckpointError(f"{path}: tensor {name} has {end - begin} bytes, which do not make {dtype} {list(shape)}")
    return Entry(path, DTYPES[dtype], shape, data + begin, data + end)


class TensorStore:
    """Reads tensors by name from one or many safetensors files. Opening it reads the headers only."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = dict(entries)

    @classmethod
    def open(cls, directory: Path) -> TensorStore:
        """The store of a HF directory: its index and shards, or its single file.

        Raises:
            CheckpointError: no weights, a missing shard, a damaged index or file, a tensor the index promises and no shard has.
        """
        index = directory / INDEX_NAME
        if not index.is_file():
            single = directory / SINGLE_NAME
            if not single.is_file():
                raise CheckpointError(
                    f"{directory}: no {SINGLE_NAME} (nor {INDEX_NAME}) here; optkit reads safetensors weights only"
                )
            return cls(read_header(single))
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: damaged ({type(error).__name__}: {error}); download or copy it again") from error
        entries: dict[str, Entry] = {}
        for shard in shards:
            if not (directory / shard).is_file():
                raise CheckpointError(f"{directory / shard}: missing, though {INDEX_NAME} lists it; download or copy it again")
            entries.update(read_header(directory / shard))
        missing = sorted(name for name, shard in weight_map.items() if name not in entries)
        if missing:
            raise CheckpointError(
                f"{index}: promises {missing[0]} ({len(missing)} such), and no shard has it; download it again"
            )
        return cls(entries)

    def names(self) -> list[str]:
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        return self._entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self.entry(name).dtype

    def nbytes(self, name: str) -> int:
        entry = self.entry(name)
        return entry.end - entry.begin

    def get(self, name: str) -> Tensor:
        """The tensor, in memory of its own."""
        entry = self.entry(name)
        out = torch.empty(entry.shape, dtype=entry.dtype)
        if entry.end > entry.begin:
            view: Any = memoryview(out.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            with open(entry.file, "rb", buffering=0) as handle:
                handle.seek(entry.begin)
                done = 0
                while done < len(view):
                    step = handle.readinto(view[done:])
                    if not step:
                        raise CheckpointError(f"{entry.file}: ended inside {name}; download or copy it again")
                    done += step
        return out


class ShardWriter:
    """Writes safetensors shards into ``directory`` as tensors come; holds one shard at most (or one larger tensor)."""

    def __init__(self, directory: Path, shard_bytes: int | None = None) -> None:
        self.directory, self.shard_bytes = directory, shard_bytes or SHARD_BYTES
        self.total = 0
        self._size = 0
        self._pending: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        count = tensor.numel() * tensor.element_size()
        if self._pending and self._size + count > self.shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._size += count
        self.total += count

    def _flush(self) -> None:
        save_file(self._pending, self._part(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._size = {}, 0

    def _part(self, index: int) -> Path:
        return self.directory / f"shard-{index}.part"

    def close(self) -> list[str]:
        """Writes what is pending and names the files: ``model.safetensors``, or shards and ``model.safetensors.index.json``."""
        if self._pending or not self._shards:
            self._flush()
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self.directory / SINGLE_NAME)
            return [SINGLE_NAME]
        files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        weight_map: dict[str, str] = {}
        for i, file in enumerate(files):
            self._part(i).rename(self.directory / file)
            weight_map.update(dict.fromkeys(self._shards[i], file))
        index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(weight_map.items()))}
        (self.directory / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        return files


def write_shards(directory: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int | None = None) -> list[str]:
    """Writes ``tensors`` with a :class:`ShardWriter` (:data:`SHARD_BYTES` each); returns the names of the safetensors files."""
    writer = ShardWriter(directory, shard_bytes)
    for name, tensor in tensors:
        writer.add(name, tensor)
    return writer.close()


# compressed-tensors


def pack_for_store(quantized: QuantizedWeight) -> dict[str, Tensor]:
    """A quantized matrix as the tensors of its module: ``weight_packed`` and so on, without the module's name.

    Raises:
        UnsupportedError: a shifted scheme, for which the format has no place.
    """
    scheme, codes = quantized.scheme, quantized.codes
    if scheme.shifted:
        raise UnsupportedError(f"compressed-tensors holds no shift, so {scheme.describe()} cannot be stored; quantize it anew")
    scale = storable(quantized.scale, SCALE_DTYPE) if scheme.symmetric else quantized.scale.float()
    if scheme.activation_bits == 8:
        tensors = {"weight": (codes.to(torch.int16) - 128).to(torch.int8), "weight_scale": scale}
        return tensors if quantized.input_scale is None else {**tensors, "input_scale": quantized.input_scale.reshape(1)}
    tensors = {
        "weight_packed": torch.from_numpy(packing.pack_int32(codes.cpu().numpy(), scheme.num_bits)),
        "weight_scale": scale,
        "weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
    }
    if quantized.zero_point is not None:
        words = packing.pack_int32(quantized.zero_point.cpu().numpy(), scheme.num_bits, axis=0)
        tensors["weight_zero_point"] = torch.from_numpy(words)
    return tensors


def storable(tensor: Tensor, *dtypes: torch.dtype) -> Tensor:
    """``tensor`` in the first of ``dtypes`` that changes no value, else as it is."""
    for dtype in dtypes:
        cast = tensor.to(dtype)
        if torch.equal(cast.to(torch.float32), tensor.to(torch.float32)):
            return cast
    return tensor


def _args(scheme: QuantScheme) -> dict[str, Any]:
    strategy = "channel" if scheme.group_size is None else "group"
    args: dict[str, Any] = {"num_bits": scheme.num_bits, "type": "int", "symmetric": scheme.symmetric, "strategy": strategy}
    return {**args, "group_size": scheme.group_size, "dynamic": False}


def _group(scheme: QuantScheme, targets: list[str]) -> dict[str, Any]:
    activations = None
    if scheme.activation_bits == 8:
        activations = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": scheme.dynamic_activations}
        activations["strategy"] = "token" if scheme.dynamic_activations else "tensor"
    form = "int-quantized" if scheme.activation_bits == 8 else "pack-quantized"
    return {
        "targets": targets,
        "weights": _args(scheme),
        "input_activations": activations,
        "output_activations": None,
        "format": form,
    }


def quantization_config(schemes: Mapping[str, QuantScheme], ignore: Iterable[str] = ()) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    The scheme of most modules targets ``Linear``; the others name their modules, and come first, for the first match counts.
    transformers can only load zero points while dequantizing, and then knows one scheme, so asymmetric schemes ask for that.

    Args:
        schemes: module name -> scheme of the linears stored quantized.
        ignore: linears that are not.
    """
    counts = Counter(schemes.values()).most_common()
    groups: dict[str, Any] = {}
    for i, (scheme, _) in enumerate(reversed(counts)):
        common = scheme == counts[0][0]
        targets = ["Linear"] if common else [name for name, own in schemes.items() if own == scheme]
        groups[f"group_{i}"] = _group(scheme, targets)
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": sorted(ignore),
        **({} if all(scheme.symmetric for scheme in schemes.values()) else {"dequantize": True}),
    }
