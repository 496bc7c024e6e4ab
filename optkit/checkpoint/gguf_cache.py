"""GGUF files: the place a converted one is kept, and reading one without parsing it three times over.

A GGUF file is one file with weights in blocks of a few bits, config and tokenizer. optkit works on directories, so config
and tokenizer are written into one once (gguf_support.py), and found again by the file's content. Of an architecture whose
layout is not known (gguf_layout.py) the weights are written there too, as float16.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from optkit import manifest
from optkit.checkpoint import files
from optkit.errors import DependencyError, storage_errors


def converted(path: Path, version: str, write: Callable[[Path, Path], None]) -> Path:
    """The directory made of a GGUF file: from the cache, or ``write(path, directory)`` makes it.

    Args:
        path: the file.
        version: of what converts, part of the key.
        write: fills an empty directory; nothing is left of it if it raises.

    """
    key = manifest.json_digest([files.cached_file_digest(path), version])[:32]
    final = files.cache_directory() / "gguf" / key
    if (final / files.CONFIG).is_file():
        return final
    with storage_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=final.parent))
        try:
            write(path, staging)
            staging.chmod(0o755)
            with contextlib.suppress(OSError):  # another process was first: its directory is as good
                os.rename(staging, final)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return final


@contextlib.contextmanager
def parsed_once() -> Iterator[None]:
    """transformers opens a GGUF file for tokenizer, config and weights, and looks up names by a table it makes for every
    module; in here each is made once. Saves two thirds of the time for a small model, whose vocabulary is most of what is
    parsed.
    """
    try:
        import gguf
    except ImportError as error:
        raise DependencyError("reading a GGUF file needs the gguf library: pip install optkit[quantize]") from error
    library: Any = gguf
    reader, names = library.GGUFReader, library.get_tensor_name_map
    library.GGUFReader = functools.lru_cache(maxsize=1)(reader)
    library.get_tensor_name_map = functools.lru_cache(maxsize=8)(names)
    try:
        yield
    finally:
        library.GGUFReader, library.get_tensor_name_map = reader, names
