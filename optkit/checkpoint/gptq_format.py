"""GPTQ checkpoints (AutoGPTQ, GPTQModel, optimum), packed to packed.

For a linear with ``I`` inputs and ``O`` outputs, ``b`` bits and ``p = 32 / b`` codes in a 32-bit word, lowest bits first:

``qweight`` int32 ``[I/p, O]``   codes, packed along the input
``qzeros``  int32 ``[G, O/p]``   zero points, packed along the output
``scales``  ``[G, O]``
``g_idx``   int32 ``[I]``        the group of each input; sorted unless quantized in activation order (``desc_act``)

``w = (code - zero) * scale``. Format v1 (``checkpoint_format: gptq``, or none given) stores ``zero - 1``, subtracted from the
packed words as whole numbers: a zero point of 0 borrows from its neighbour, so it is the words that get the ones back, before
they are taken apart. v2 (``gptq_v2``) stores the zero points.

Bits and group size are taken from the tensors' shapes, for GPTQModel's ``dynamic`` rules set them module by module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optkit import packing
from optkit.checkpoint.affine import QuantizedWeight
from optkit.checkpoint.packed import Packed, uniform_groups
from optkit.checkpoint.store import TensorStore
from optkit.errors import CheckpointError, UnsupportedError
from optkit.scheme import QuantScheme

ONES = {4: 0x11111111, 8: 0x01010101}
FORMATS = {"gptq": 1, "gptq_v2": 0}  # -> what the stored zero points lack


class Gptq(Packed):
    """Modules stored as ``qweight``, ``qzeros``, ``scales`` and perhaps ``g_idx``.

    Raises:
        UnsupportedError: another layout (Marlin, …), 2 or 3 bits, groups no kernel takes; names the tensor.
        CheckpointError: tensors missing, or of shapes that contradict each other.
    """

    lead = ("qweight",)
    leaves = ("qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any], store: TensorStore) -> None:
        super().__init__(store, {})
        modules = [name.removesuffix(".qweight") for name in store.names() if name.endswith(".qweight")]
        layout = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
        marlin = next((name for name in store.names() if name.endswith((".B", ".marlin_qweight"))), None)
        if layout not in FORMATS or config.get("is_marlin_format") or marlin:
            shown = marlin or (f"{modules[0]}.qweight" if modules else "the checkpoint")
            raise UnsupportedError(
                f"{shown}: GPTQ weights in the layout {'marlin' if marlin else layout!r}, which is a kernel's own; optkit "
                "reads gptq and gptq_v2: take the checkpoint as it was before it was repacked"
            )
        if not modules:
            raise CheckpointError("quantization_config says gptq, and no tensor is called qweight; download it again")
        self._lacking = FORMATS[layout]
        self._symmetric = bool(config.get("sym", True))
        self._picks: dict[str, Tensor] = {}
        for module in modules:
            self.schemes[module] = self._scheme(module, config)

    def _scheme(self, module: str, config: Mapping[str, Any]) -> QuantScheme:
        for leaf in ("qzeros", "scales"):
            if f"{module}.{leaf}" not in self.store:
                raise CheckpointError(f"{module}.{leaf}: missing beside {module}.qweight; download the checkpoint again")
        words, outputs = self.store.shape(f"{module}.qweight")
        groups, columns = self.store.shape(f"{module}.scales")
        zero_words = self.store.shape(f"{module}.qzeros")[1]
        bits = 32 * zero_words // outputs if outputs else 0
        if bits not in (4, 8):
            raise UnsupportedError(
                f"{module}.qweight: {bits or config.get('bits')}-bit GPTQ weights; optkit reads 4 and 8 bits: take a 4 or "
                "8-bit checkpoint, or quantize the original model with optkit"
            )
        inputs = words * 32 // bits
        if columns != outputs or self.store.shape(f"{module}.qzeros")[0] != groups:
            raise CheckpointError(
                f"{module}: qweight {[words, outputs]}, scales {[groups, columns]} and qzeros "
                f"{list(self.store.shape(f'{module}.qzeros'))} do not belong together; download the checkpoint again"
            )
        size, self._picks[module] = uniform_groups(self._index(module, inputs, groups, config), f"{module}.g_idx")
        return QuantScheme(num_bits=bits, symmetric=self._symmetric, group_size=size)

    def _index(self, module: str, inputs: int, groups: int, config: Mapping[str, Any]) -> Tensor:
        """``[I]`` the group of each input."""
        if f"{module}.g_idx" in self.store:
            index = self.store.get(f"{module}.g_idx")
            if len(index) != inputs or int(index.max()) >= groups or int(index.min()) < 0:
                raise CheckpointError(f"{module}.g_idx: does not fit {inputs} inputs in {groups} groups; download it again")
            return index
        said = int(config.get("group_size", -1))
        size = said if said > 0 and -(-inputs // said) == groups else -(-inputs // groups)
        return torch.arange(inputs) // size

    def read(self, module: str) -> QuantizedWeight:
        scheme = self.schemes[module]
        words = self.store.get(f"{module}.qweight").numpy()
        inputs = words.shape[0] * 32 // scheme.num_bits
        codes = packing.unpack_int32(words, scheme.num_bits, inputs, axis=0)
        scale = self.store.get(f"{module}.scales").t()[:, self._picks[module]].contiguous()
        zeros = self.store.get(f"{module}.qzeros").numpy()
        if self._lacking:
            zeros = (zeros.view(np.uint32) + np.uint32(ONES[scheme.num_bits])).view(np.int32)
        points = torch.from_numpy(packing.unpack_int32(zeros, scheme.num_bits, scale.shape[0], axis=1))
        zero_point = None if scheme.symmetric else points.t()[:, self._picks[module]].contiguous()
        if scheme.symmetric and bool((points != scheme.zero_point).any()):
            raise CheckpointError(
                f"{module}.qzeros: the config says sym, and zero points go from {int(points.min())} to {int(points.max())} "
                f"where {scheme.zero_point} is meant; set sym to false, or "
                "checkpoint_format to what the file has (gptq or gptq_v2)"
            )
        return QuantizedWeight(torch.from_numpy(np.ascontiguousarray(codes.T)), scale, zero_point, scheme)
