"""Runs an ONNX graph piece by piece, so that verifying a model of any size takes the memory of one piece.

The nodes, in their order, are cut where the weights they need reach a budget. Each piece becomes a model of its own over the
same external data file, is opened, run and dropped; only the values that later pieces or the caller need are kept. Slow
(every run reads every weight again), exact, and bounded: one piece holds the budget, or one tensor if that is larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

BUDGET = 400 << 20  # bytes of weights in one piece


@dataclass
class Segment:
    """Consecutive nodes with the constants they read, the values they need from before and those needed after."""

    nodes: list[onnx.NodeProto]
    constants: list[onnx.TensorProto]
    needs: list[str]
    gives: list[str]


class SegmentedSession:
    """``run(outputs, feeds)`` like an ``InferenceSession``; ``model`` is a graph whose external data lies in ``folder``."""

    def __init__(self, model: onnx.ModelProto, folder: Path, budget: int = BUDGET) -> None:
        self.model, self.folder, self.budget = model, folder, budget
        self.segments = cut(model.graph, budget)

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        values: dict[str, Any] = dict(feeds)
        inputs = {value.name for value in self.model.graph.input}
        for constant in self.model.graph.initializer:  # an input's default
            if constant.name in inputs and constant.name not in values:
                values[constant.name] = numpy_helper.to_array(constant)
        last_use = {name: index for index, segment in enumerate(self.segments) for name in segment.needs}
        for index, segment in enumerate(self.segments):
            values.update(zip(segment.gives, self._run(segment, values), strict=True))
            for name in [n for n in values if last_use.get(n, -1) <= index and n not in outputs]:
                del values[name]
        return [values[name] for name in outputs]

    def _run(self, segment: Segment, values: Mapping[str, Any]) -> list[Any]:
        if self._is_large_product(segment):
            return [self._product(segment, values)]

        def described(name: str) -> onnx.ValueInfoProto:
            array = np.asarray(values[name])
            return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim)

        graph = helper.make_graph(
            segment.nodes,
            "segment",
            [described(name) for name in segment.needs],
            [onnx.ValueInfoProto(name=name) for name in segment.gives],
            segment.constants,
        )
        model = helper.make_model(graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self.folder))
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(session.run(segment.gives, {name: values[name] for name in segment.needs}))

    def _is_large_product(self, segment: Segment) -> bool:
        if len(segment.nodes) != 1 or segment.nodes[0].op_type != "MatMul" or not segment.constants:
            return False
        weight = segment.constants[0]
        return weight.data_type == onnx.TensorProto.FLOAT16 and tensor_bytes(weight) > self.budget

    def _product(self, segment: Segment, values: Mapping[str, Any]) -> Any:
        """``x @ W`` for a float16 ``W [I, O]`` of more than the budget, some columns at a time, summed in float32 as ONNX
        Runtime does on the CPU; it would convert all of ``W`` first."""
        weight, (x,) = segment.constants[0], (values[name] for name in segment.needs)
        entries = {entry.key: entry.value for entry in weight.external_data}
        rows, columns = weight.dims
        path, offset = self.folder / entries["location"], int(entries.get("offset", 0))
        table = np.memmap(path, np.float16, "r", offset, (rows, columns))
        wide = x.astype(np.float32)
        step = max(1, self.budget // (8 * rows))
        parts = [wide @ table[:, start : start + step].astype(np.float32) for start in range(0, columns, step)]
        return np.concatenate(parts, -1).astype(x.dtype)


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Of the data, whether it is here or in the external file."""
    for entry in tensor.external_data:
        if entry.key == "length":
            return int(entry.value)
    return tensor.ByteSize()


def cut(graph: onnx.GraphProto, budget: int) -> list[Segment]:
    """Cuts the graph where the constants reach ``budget`` bytes."""
    inputs = {value.name for value in graph.input}
    constants = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in inputs}
    pieces: list[list[onnx.NodeProto]] = [[]]
    held: set[str] = set()
    size = 0
    for node in graph.node:
        fresh = {name for name in node.input if name in constants} - held
        added = sum(tensor_bytes(constants[name]) for name in fresh)
        if pieces[-1] and (size + added > budget or size > budget):
            pieces.append([])
            held, size = set(), 0
            fresh = {name for name in node.input if name in constants}
            added = sum(tensor_bytes(constants[name]) for name in fresh)
        pieces[-1].append(node)
        held |= fresh
        size += added
    wanted = {value.name for value in graph.output}
    segments: list[Segment] = []
    for piece in reversed(pieces):
        made = {name for node in piece for name in node.output if name}
        read = {name for node in piece for name in node.input if name}
        gives = sorted(made & wanted)
        needs = sorted(read - made - set(constants))
        wanted = (wanted - made) | set(needs)
        segments.append(Segment(piece, [constants[name] for name in sorted(read & set(constants))], needs, gives))
    return segments[::-1]
