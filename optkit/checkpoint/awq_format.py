"""AWQ checkpoints (AutoAWQ, llm-awq through AutoAWQ) in the GEMM layout, packed to packed.

For a linear with ``I`` inputs and ``O`` outputs, eight 4-bit codes in a 32-bit word, both along the output:

``qweight`` int32 ``[I, O/8]``
``qzeros``  int32 ``[G, O/8]``
``scales``  ``[G, O]``

The word ``c`` holds outputs ``8c + ORDER[j]`` in bits ``[4j, 4j+4)``, the order in which its GEMM kernel takes them apart.
``w = (code - zero) * scale``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from optkit import packing
from optkit.checkpoint.affine import QuantizedWeight
from optkit.checkpoint.packed import Packed, uniform_groups
from optkit.checkpoint.store import TensorStore
from optkit.errors import CheckpointError, UnsupportedError
from optkit.scheme import QuantScheme

BITS, PER_WORD = 4, 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACE = np.argsort(ORDER)  # output 8c + i is at nibble _PLACE[i]


class Awq(Packed):
    """Modules stored as ``qweight``, ``qzeros`` and ``scales`` in AWQ's GEMM layout.

    Raises:
        UnsupportedError: another layout (GEMV, …), other bits, no zero points, groups no kernel takes; names the tensor.
        CheckpointError: tensors missing, or of shapes that contradict each other.
    """

    lead = ("qweight",)
    leaves = ("qzeros", "scales")

    def __init__(self, config: Mapping[str, Any], store: TensorStore) -> None:
        super().__init__(store, {})
        self._runs: dict[str, torch.Tensor] = {}
        modules = [name.removesuffix(".qweight") for name in store.names() if name.endswith(".qweight")]
        if not modules:
            raise CheckpointError("quantization_config says awq, and no tensor is called qweight; download it again")
        layout = str(config.get("version") or config.get("format") or "gemm").lower()
        bits = int(config.get("bits") or config.get("w_bit") or BITS)
        if layout not in ("gemm", "exllama"):
            raise UnsupportedError(
                f"{modules[0]}.qweight: AWQ weights in the layout {layout!r}; optkit reads gemm: take the model's gemm version"
            )
        if bits != BITS:
            raise UnsupportedError(
                f"{modules[0]}.qweight: {bits}-bit AWQ weights; optkit reads 4 bits: take a 4-bit checkpoint, or quantize the "
                "original model with optkit"
            )
        for module in modules:
            self.schemes[module] = self._scheme(module)

    def _scheme(self, module: str) -> QuantScheme:
        for leaf in ("qzeros", "scales"):
            if f"{module}.{leaf}" not in self.store:
                raise UnsupportedError(
                    f"{module}.{leaf}: missing beside {module}.qweight; optkit reads AWQ with zero points (zero_point: true)"
                )
        inputs, words = self.store.shape(f"{module}.qweight")
        groups, outputs = self.store.shape(f"{module}.scales")
        if words * PER_WORD != outputs or self.store.shape(f"{module}.qzeros") != (groups, words) or inputs % groups:
            raise CheckpointError(
                f"{module}: qweight {[inputs, words]}, scales {[groups, outputs]} and qzeros "
                f"{list(self.store.shape(f'{module}.qzeros'))} are not AWQ's gemm layout; take the checkpoint's gemm version"
            )
        size, self._runs[module] = uniform_groups(torch.arange(inputs) // (inputs // groups), f"{module}.scales")
        return QuantScheme(num_bits=BITS, symmetric=False, group_size=size)

    def read(self, module: str) -> QuantizedWeight:
        runs = self._runs[module]
        codes, zero_point = (_outputs_first(self.store.get(f"{module}.{leaf}").numpy()) for leaf in ("qweight", "qzeros"))
        scale = self.store.get(f"{module}.scales").t()[:, runs].contiguous()
        return QuantizedWeight(codes, scale, zero_point[:, runs].contiguous(), self.schemes[module])


def _outputs_first(words: np.ndarray) -> torch.Tensor:
    """int32 ``[N, O/8]`` -> uint8 codes ``[O, N]``."""
    rows = words.shape[0]
    codes = packing.unpack_int32(words, BITS, words.shape[1] * PER_WORD, axis=1)
    ordered = codes.reshape(rows, -1, PER_WORD)[:, :, _PLACE].reshape(rows, -1)
    return torch.from_numpy(np.ascontiguousarray(ordered.T))
