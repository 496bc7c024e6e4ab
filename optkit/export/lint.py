"""What TensorRT's ONNX parser refuses, drops or misreads, found before the parser sees the graph.

Refusals are the smaller problem: the parser names the node, late. Worse are constructs it accepts and changes:
``Attention`` inputs and attributes that are ignored (``nonpad_kv_seqlen``, the windows), a causal mask aligned to the
other corner than a cache needs, an unsigned ``QuantizeLinear`` computed as signed, a double computed as float, an input
that nothing reads. Such an engine builds, runs, and answers wrongly. Every rule below was established by giving the
construct to the parser and builder of TensorRT-RTX 1.7.1; ``tests/trt_cases.py`` does so again for each, both ways.
Standard TensorRT 11 has the same parser; its verdicts could not be checked and are assumed to be the same.

A rule is a function of one node; to add one, add a function to ``RULES`` or ``GRAPH_RULES`` in ``lint_rules.py``.
Reading the whole graph costs one pass over the nodes; weights are not read, except scales and zero points.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
from onnx_ir.traversal import RecursiveGraphIterator

from optkit.errors import ArtifactError, UnsupportedError
from optkit.export.lint_facts import FAILS, NOTE, REFUSED, SILENT, Context, Finding, label
from optkit.export.lint_rules import EVERY_NODE, GRAPH_RULES, RULES
from optkit.export.profiles import Dims

__all__ = ["FAILS", "NOTE", "REFUSED", "SILENT", "Finding", "errors", "graph_inputs", "lint", "raise_errors"]


def lint(
    model: str | Path | ir.Model,
    flavour: str = "tensorrt_rtx",
    capabilities: Sequence[str] = (),
    decompose_attention: bool = True,
) -> list[Finding]:
    """Everything in a graph that TensorRT refuses, fails on, or computes differently.

    Args:
        model: an ONNX file (external weights are not read) or an onnx_ir model (not changed).
        flavour: ``tensorrt_rtx`` or ``tensorrt``.
        capabilities: compute capabilities the engine is for; those that lack an element type are found.
        decompose_attention: the builder will mark attention layers without a dedicated kernel as decomposable.

    Returns:
        Findings in graph order; :func:`errors` keeps those that must stop a build.

    Raises:
        ArtifactError: the file is not a readable ONNX model.
    """
    context = Context(_load(model), flavour, tuple(capabilities), decompose_attention)
    findings = []
    for rule in GRAPH_RULES:
        findings += list(rule(context))
    for node in RecursiveGraphIterator(context.graph):
        for check in (*RULES.get(node.op_type, ()), *EVERY_NODE):
            findings += [
                Finding(r, label(node), node.op_type, effect, why, fix) for r, effect, why, fix in check(node, context)
            ]
    return findings


def errors(findings: Sequence[Finding]) -> list[Finding]:
    return [f for f in findings if f.effect != NOTE]


def raise_errors(findings: Sequence[Finding], where: str) -> None:
    """Raises UnsupportedError naming every finding that must stop a build (all of them, so that one run shows the work)."""
    bad = errors(findings)
    if bad:
        lines = "".join(f"\n  {f}" for f in bad)
        raise UnsupportedError(f"{where}: TensorRT would not compute this graph as written, {len(bad)} finding(s):{lines}")


def graph_inputs(model: str | Path | ir.Model) -> dict[str, Dims]:
    """Graph input -> its dimensions (numbers and symbols); initializers are not inputs. For the profile solver.

    Raises:
        UnsupportedError: an input without a rank, or with a nameless dynamic dimension.
    """
    found: dict[str, Dims] = {}
    for value in _load(model).graph.inputs:
        if value.is_initializer():
            continue
        if value.shape is None:
            raise UnsupportedError(f"input {value.name}: has no rank, and TensorRT needs one; export it with a shape")
        dims = tuple(d if isinstance(d, int) else d.value for d in value.shape)
        if None in dims:
            raise UnsupportedError(f"input {value.name} {list(dims)}: a dynamic dimension has no name; name it in the export")
        found[str(value.name)] = dims  # type: ignore[assignment]
    return found


def _load(model: str | Path | ir.Model) -> ir.Model:
    if isinstance(model, ir.Model):
        return model
    if not Path(model).is_file():
        raise ArtifactError(f"{model}: no such file")
    try:
        return ir.load(model)
    except Exception as error:
        raise ArtifactError(f"{model}: not a readable ONNX model ({type(error).__name__}: {error})") from error
