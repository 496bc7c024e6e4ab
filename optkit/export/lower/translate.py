"""A captured program -> an onnx_ir model, through torch.onnx with a target's translation table.

torch.onnx would first run decompositions, which traces the whole program a second time, and afterwards a rewriter that tries
every rule on every node: together three quarters of its time. A captured program without mutation whose operators all have a
translation needs neither, so the first is skipped when that is so, and the few rewrites that matter are passes.py.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import onnx_ir as ir
import torch
from torch.onnx._internal.exporter import _fx_passes

from optkit.errors import UnsupportedError
from optkit.export import hooks
from optkit.export.lower.special import SpecialTable


def translate(
    program: torch.export.ExportedProgram,
    table: dict[Any, Callable[..., Any]],
    opset: int,
    input_names: list[str],
    output_names: list[str],
) -> ir.Model:
    """Raises UnsupportedError, naming the operator, if one has no translation."""
    with hooks.exporter_patches() as transformers_table, _quiet(), _fewer_decompositions():
        special = SpecialTable(opset).table()
        hooks.apply_graph_fixes(program.graph_module)
        try:
            result = torch.onnx.export(
                program,
                (),
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=opset,
                input_names=input_names,
                output_names=output_names,
                custom_translation_table={**transformers_table, **special, **table},
            )
        except torch.onnx.errors.OnnxExporterError as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            text = " ".join(str(cause).split())
            raise UnsupportedError(
                f"the model uses an operation that has no translation for this target: {text[:400]}"
            ) from error
    assert result is not None
    return result.model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.onnx reports every library it does not find."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)


@contextlib.contextmanager
def _fewer_decompositions() -> Iterator[None]:
    """Skips torch.onnx's decomposition and type promotion where they would change nothing."""
    original, promotion = _fx_passes.decompose_with_registry, _fx_passes.insert_type_promotion_nodes

    def decompose(program: torch.export.ExportedProgram, registry: Any) -> torch.export.ExportedProgram:
        return program if _translatable(program, registry) else original(program, registry)

    def promote(graph_module: torch.fx.GraphModule) -> None:
        if _mixes_dtypes(graph_module):
            promotion(graph_module)

    _fx_passes.decompose_with_registry, _fx_passes.insert_type_promotion_nodes = decompose, promote  # type: ignore[assignment]
    try:
        yield
    finally:
        _fx_passes.decompose_with_registry, _fx_passes.insert_type_promotion_nodes = original, promotion


# Operators whose tensor arguments have different dtypes by nature.
_MIXED = frozenset(
    [
        "aten::embedding",
        "aten::index.Tensor",
        "aten::gather",
        "aten::where.self",
        "aten::masked_fill.Scalar",
        "aten::index_select",
    ]
)


def _mixes_dtypes(graph_module: torch.fx.GraphModule) -> bool:
    """Might some operator promote its arguments? (It runs the program once more to find out; most programs need none.)"""
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target.name()
        if not name.startswith("aten::") or name in _MIXED:
            continue
        value = node.meta.get("val")
        arguments = {a.meta["val"].dtype for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)}
        compares = isinstance(value, torch.Tensor) and value.dtype == torch.bool
        converts = name.startswith(("aten::to.", "aten::_to_copy", "aten::sum", "aten::cumsum", "aten::type_as"))
        changes = isinstance(value, torch.Tensor) and arguments and not compares and value.dtype not in arguments
        if (len(arguments) > 1 or changes) and not converts:
            return True
    return False


def _translatable(program: torch.export.ExportedProgram, registry: Any) -> bool:
    """No operator mutates, none nests a graph, and each has a translation of its own."""
    for node in program.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            if node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
                return False
            continue
        if node.target._schema.is_mutable:
            return False
        assertion = node.target.name().startswith(("aten::sym_constrain", "aten::_assert"))
        if not assertion and not registry.is_registered(node.target):
            return False
    return True
