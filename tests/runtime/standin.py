"""A stand-in for a TensorRT engine and its execution contexts: the same ONNX file, run by ONNX Runtime on the host.

It is bound the way the library is, by raw address, and holds the caller to the library's documented contract, which ONNX
Runtime alone would not: shapes inside the profile, every tensor bound, the cache's output at the address of its input, one
context per profile, a profile and shapes before the run. What a GPU computes it cannot show.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto

from optkit import io_spec

DataType = enum.Enum("DataType", ["FLOAT", "HALF", "BF16", "INT8", "INT32", "INT64", "BOOL", "UINT8"])
TensorIOMode = enum.Enum("TensorIOMode", ["NONE", "INPUT", "OUTPUT"])
TensorLocation = enum.Enum("TensorLocation", ["DEVICE", "HOST"])
# a library enum prints as "DataType.HALF" as well
TYPES = {
    TensorProto.FLOAT: DataType.FLOAT,
    TensorProto.FLOAT16: DataType.HALF,
    TensorProto.BFLOAT16: DataType.BF16,
    TensorProto.INT8: DataType.INT8,
    TensorProto.INT32: DataType.INT32,
    TensorProto.INT64: DataType.INT64,
    TensorProto.BOOL: DataType.BOOL,
    TensorProto.UINT8: DataType.UINT8,
}


class ContractBroken(AssertionError):
    """The caller did what the library forbids (there: undefined behaviour or a wrong answer, here: this)."""


class Engine:
    """As ``ICudaEngine``. ``profiles`` are ``{input: (min, opt, max)}``, one for each optimization profile."""

    def __init__(self, path: str | Path, profiles: Sequence[Mapping[str, Any]], accuracy_level: int = 1) -> None:
        graph = onnx.load(str(path), load_external_data=False).graph
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = 1
        settings.log_severity_level = 3
        settings.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(accuracy_level))
        if any(node.op_type == "QuantizeLinear" for node in graph.node):
            settings.add_session_config_entry(*io_spec.EXACT_INT8)
        self.session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        constants = {i.name for i in graph.initializer}
        self.ins = {v.name: v.type.tensor_type for v in graph.input if v.name not in constants}
        self.outs = {v.name: v.type.tensor_type for v in graph.output}
        self.names = [*self.ins, *self.outs]
        self.profiles = profiles
        self.alias = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "TensorScatter"}
        self.in_use: dict[int, Context] = {}
        self.runs = 0

    @property
    def num_io_tensors(self) -> int:
        return len(self.names)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> Any:
        return TensorIOMode.INPUT if name in self.ins else TensorIOMode.OUTPUT

    def get_tensor_location(self, name: str) -> Any:
        return TensorLocation.DEVICE

    def tensor_type(self, name: str) -> Any:
        return self.ins[name] if name in self.ins else self.outs[name]

    def get_tensor_dtype(self, name: str) -> Any:
        return TYPES[self.tensor_type(name).elem_type]

    def symbols(self, name: str) -> tuple[int | str, ...]:
        return tuple(d.dim_param or d.dim_value for d in self.tensor_type(name).shape.dim)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(-1 if isinstance(d, str) else d for d in self.symbols(name))

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        fixed = self.get_tensor_shape(name)
        return [tuple(s) for s in self.profiles[profile].get(name, (fixed, fixed, fixed))]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.alias.get(name)

    def create_execution_context(self) -> Context:
        return Context(self)


class Context:
    """As ``IExecutionContext``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.profile: int | None = None
        self.shapes = {n: engine.get_tensor_shape(n) for n in engine.ins}
        self.addresses: dict[str, int] = {}
        self.calls: list[str] = []

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        if not 0 <= profile < self.engine.num_optimization_profiles:
            return False
        if self.engine.in_use.get(profile, self) is not self:
            raise ContractBroken(f"profile {profile} is used by another context")
        self.engine.in_use = {p: c for p, c in self.engine.in_use.items() if c is not self} | {profile: self}
        self.profile = profile
        self.shapes = {n: self.engine.get_tensor_shape(n) for n in self.engine.ins}
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        self.calls.append("set_input_shape")
        shape = tuple(shape)
        if self.profile is None:
            raise ContractBroken("a shape before a profile")
        if name not in self.engine.ins:
            return False
        low, _, high = self.engine.get_tensor_profile_shape(name, self.profile)
        if len(shape) != len(low) or any(not a <= d <= c for a, d, c in zip(low, shape, high, strict=True)):
            return False
        self.shapes[name] = shape
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name, shape in self.shapes.items() if -1 in shape]

    def _values(self) -> dict[str, int]:
        values: dict[str, int] = {}
        for name in self.engine.ins:
            for symbol, size in zip(self.engine.symbols(name), self.shapes[name], strict=True):
                if isinstance(symbol, str) and values.setdefault(symbol, size) != size:
                    raise ContractBroken(f"{symbol} is {values[symbol]} and, at {name}, {size}")
        if io_spec.PAST in values:
            total = values[io_spec.PAST] + values[io_spec.SEQUENCE]
            if values.setdefault(io_spec.TOTAL, total) != total:
                raise ContractBroken(f"a mask of {values[io_spec.TOTAL]} columns for {total} tokens")
            values[io_spec.PRESENT] = total
        return values

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self.engine.ins:
            return self.shapes[name]
        values = self._values()
        return tuple(values.get(d, -1) if isinstance(d, str) else d for d in self.engine.symbols(name))

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.calls.append("set_tensor_address")
        if name not in self.engine.names:
            return False
        if not isinstance(address, int):
            raise TypeError("an address is an int")
        self.addresses[name] = address
        return True

    def get_tensor_address(self, name: str) -> int:
        return self.addresses.get(name, 0)

    def execute_async_v3(self, stream_handle: int) -> bool:
        self.calls.append("execute_async_v3")
        if self.profile is None or self.infer_shapes() or any(not self.addresses.get(n) for n in self.engine.names):
            return False
        for output, source in self.engine.alias.items():
            if self.addresses[output] != self.addresses[source]:
                raise ContractBroken(f"{output} has to be at the address of {source}: the update is in place")
        read = {self.addresses[n] for n in self.engine.ins}
        for output in self.engine.outs:
            if output not in self.engine.alias and self.addresses[output] in read:
                raise ContractBroken(f"{output} is written where an input is read")
        self._values()
        self._check_writes()
        binding = self.engine.session.io_binding()
        for name in self.engine.ins:
            binding.bind_input(
                name, "cpu", 0, self.engine.tensor_type(name).elem_type, list(self.shapes[name]), self.addresses[name]
            )
        for name in self.engine.outs:
            shape = list(self.get_tensor_shape(name))
            binding.bind_output(name, "cpu", 0, self.engine.tensor_type(name).elem_type, shape, self.addresses[name])
        self.engine.session.run_with_iobinding(binding)
        self.engine.runs += 1
        return True

    def _check_writes(self) -> None:
        """The library ignores writes beyond the cache without a word; here they are an error."""
        import ctypes

        if "write_indices" not in self.engine.ins:
            return
        rows, width = self.shapes["input_ids"]
        raw = (ctypes.c_int64 * rows).from_address(self.addresses["write_indices"])
        slots = next(self.engine.get_tensor_shape(n)[2] for n in self.engine.ins if n.startswith("past_key_values."))
        starts = np.ctypeslib.as_array(raw)
        if (starts < 0).any() or (starts + width > slots).any():
            raise ContractBroken(f"{width} slots from {starts.tolist()} on, and the cache has {slots}")
