"""Which reader takes a checkpoint's ``quantization_config``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from optkit.checkpoint.awq_format import Awq
from optkit.checkpoint.compressed import CompressedTensors, stored_schemes
from optkit.checkpoint.gptq_format import Gptq
from optkit.checkpoint.packed import Packed
from optkit.checkpoint.store import TensorStore
from optkit.errors import UnsupportedError


def _compressed(config: Mapping[str, Any], store: TensorStore) -> Packed:
    return CompressedTensors(store, stored_schemes(config, store))


READERS: dict[str, Callable[[Mapping[str, Any], TensorStore], Packed]] = {
    "compressed-tensors": _compressed,
    "gptq": Gptq,
    "awq": Awq,
}


def open_packed(config: Mapping[str, Any], store: TensorStore) -> Packed:
    """The quantized matrices of a store, by its method.

    Raises:
        UnsupportedError: a method that is not read; names it, a tensor it stored, and what to take in its place.
    """
    method = str(config.get("quant_method")).lower()
    if method not in READERS:
        foreign = next((name for name in store.names() if not name.endswith((".weight", ".bias"))), "its weights")
        raise UnsupportedError(
            f"{foreign}: quantized with {method!r}, which optkit does not read; it reads {', '.join(READERS)} and GGUF: "
            "take one of those, or the floating-point model and optkit quantize"
        )
    return READERS[method](config, store)
