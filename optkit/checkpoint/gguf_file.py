"""A GGUF file: its header, and the bytes of one tensor when they are asked for.

Little-endian: ``b"GGUF"``, u32 version, u64 tensor count, u64 number of metadata entries; entries (string key, u32 type,
value); tensor table (string name, u32 number of dimensions, u64 dimensions with the fastest first, u32 type, u64 offset);
then, aligned, the data. Source: the GGUF specification in ggml's documentation. The header is checked against the size of the
file when it is opened, so a cut download is an error with the file's name, and no tensor is read before it is needed.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from optkit.errors import CheckpointError, UnsupportedError

MAGIC = b"GGUF"
ALIGNMENT = 32  # unless the metadata says otherwise
VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# ggml type -> (name, elements of a block, bytes of a block)
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}
OTHER_TYPES = {
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: ``shape`` as torch has it (fastest dimension last), ``begin`` and ``end`` in the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class GgufFile:
    """A file's metadata and its table of tensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def of_model(self, key: str, default: Any = None) -> Any:
        """The metadata entry ``<architecture>.<key>``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def blocks(self, name: str) -> np.ndarray:
        """The bytes of a tensor, uint8 ``[rows, bytes of a row]``, in memory of their own."""
        tensor = self.tensors[name]
        data = np.fromfile(self.path, np.uint8, tensor.end - tensor.begin, offset=tensor.begin)
        if data.size != tensor.end - tensor.begin:
            raise CheckpointError(f"{self.path}: ended inside {name}; download or copy it again")
        return data.reshape(math.prod(tensor.shape[:-1]), -1)


class _Reader:
    def __init__(self, data: Any) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> Any:
        values = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return values[0] if len(values) == 1 else values

    def string(self) -> str:
        size = self.take("Q")
        if size > len(self.data) - self.at:
            raise ValueError("a text ends after the file does")
        self.at += size
        return bytes(self.data[self.at - size : self.at]).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.take(_SCALARS[kind])
        kind, count = self.take("IQ")
        if count > len(self.data) - self.at:
            raise ValueError("a list ends after the file does")
        if kind in _SCALARS:
            values = self.take(f"{count}{_SCALARS[kind]}") if count else ()
            return list(values) if isinstance(values, tuple) else [values]
        return [self.value(kind) for _ in range(count)]


def is_gguf(path: Path) -> bool:
    with open(path, "rb") as handle:
        return handle.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path) -> GgufFile:
    """Reads the header.

    Raises:
        CheckpointError: not a GGUF file, cut or damaged; names the file.
        UnsupportedError: a version, byte order or tensor type that is not read, or one part of several; names the tensor.
    """
    if not is_gguf(path):
        raise CheckpointError(f"{path}: not a GGUF file; download or copy it again")
    data = np.memmap(path, np.uint8, "r")
    try:
        reader = _Reader(memoryview(data))  # type: ignore[arg-type]
        reader.at = len(MAGIC)
        version, count, entries = reader.take("IQQ")
        if version not in VERSIONS:
            raise UnsupportedError(
                f"{path}: GGUF version {version}; optkit reads little-endian versions 2 and 3: convert it again"
            )
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = reader.string()
            metadata[key] = reader.value(reader.take("I"))
        rows = [_row(reader) for _ in range(count)]
    except (struct.error, ValueError, KeyError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path}: cut or damaged in its header ({error}); download or copy it again") from error
    if int(metadata.get("split.count", 0)) > 1:
        raise UnsupportedError(f"{path}: one part of {metadata['split.count']}; join them with llama-gguf-split --merge first")
    alignment = int(metadata.get("general.alignment", ALIGNMENT))
    start = -(-reader.at // alignment) * alignment
    tensors = {row[0]: _tensor(path, start, *row) for row in rows}
    end = max((tensor.end for tensor in tensors.values()), default=start)
    if end > data.size:
        raise CheckpointError(f"{path}: cut: {data.size} bytes, and its header describes {end}; download or copy it again")
    return GgufFile(path, metadata, tensors)


def _row(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = reader.string(), reader.take("I")
    if dimensions > 4:
        raise ValueError(f"tensor {name} has {dimensions} dimensions")
    shape = reader.take(f"{dimensions}Q")
    kind, offset = reader.take("IQ")
    return name, tuple(reversed(shape)) if isinstance(shape, tuple) else (shape,), kind, offset


def _tensor(path: Path, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    if kind not in TYPES:
        raise UnsupportedError(
            f"{path}: tensor {name} is of type {OTHER_TYPES.get(kind, kind)}, which optkit does not read; take a file in "
            f"{', '.join(t for t, _, _ in TYPES.values())}"
        )
    type_name, elements, size = TYPES[kind]
    if not shape or shape[-1] % elements:
        raise CheckpointError(
            f"{path}: tensor {name} {list(shape)} does not fill {type_name} blocks; download or copy it again"
        )
    begin = start + offset
    return GgufTensor(name, type_name, shape, begin, begin + math.prod(shape) // elements * size)
