"""Every construct TensorRT refuses, drops or misreads is found, nothing it takes is refused; the library is asked."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from optkit.errors import ArtifactError, UnsupportedError
from optkit.export import lint as linting
from optkit.export.engine import EngineOptions, make_job
from optkit.export.engine_worker import BuildFailed, make_logger, parse, run_job
from optkit.export.profiles import INT4_BLOCKS
from tests import trt_cases
from tests.trt_cases import CASES, Case

BAD = [case for case in CASES if case.verdict != "builds"]
GOOD = [case for case in CASES if case.verdict == "builds"]


def names(case: Case) -> str:
    return case.name


def found(case: Case) -> list[linting.Finding]:
    return linting.lint(ir.from_proto(case.model()), capabilities=case.capabilities, decompose_attention=case.decompose)


def ask_library(case: Case, tmp_path: Path, build: bool = True) -> dict[str, Any]:
    pytest.importorskip("tensorrt_rtx")
    path = tmp_path / "case.onnx"
    onnx.save(case.model(), path)
    options = EngineOptions(compute_capabilities=case.capabilities, decompose_attention=case.decompose)
    job = make_job(path, tmp_path if build else None, (), options)
    return run_job({**job, "profiles": [trt_cases.profile_of(case.model())]}, lambda line: None)


def test_there_are_at_least_forty_cases_and_every_bad_one_has_a_good_neighbour() -> None:
    assert len(CASES) >= 40
    assert len({case.name for case in CASES}) == len(CASES)
    verdicts = collections.Counter(case.verdict for case in CASES)
    assert min(verdicts[v] for v in ("builds", "refused", "fails", "dropped", "misread")) >= 2


@pytest.mark.parametrize("case", BAD, ids=names)
def test_a_construct_tensorrt_does_not_take_as_meant_is_found_with_node_reason_and_remedy(case: Case) -> None:
    findings = linting.errors(found(case))
    finding = next((f for f in findings if f.rule == case.rule), None)
    assert finding is not None, f"{case.rule} is not among {[f.rule for f in findings]}"
    assert finding.node == case.node
    assert finding.reason
    assert finding.remedy
    with pytest.raises(UnsupportedError, match=case.node):
        linting.raise_errors(findings, "case.onnx")


@pytest.mark.parametrize("case", BAD, ids=names)
def test_the_finding_has_no_company_that_the_graph_does_not_deserve(case: Case) -> None:
    """One construct is wrong in each graph; a second rule speaking up would send the user to the wrong place."""
    together = {
        "scatter of a scatter": {"scatter-input"},  # neither end of the chain is where it has to be
        "FP8 E5M2": {"quantize-type"},  # weights and activations
    }
    rules = {f.rule for f in linting.errors(found(case))}
    assert rules == {case.rule} | together.get(case.name, set())


@pytest.mark.parametrize("case", BAD, ids=names)
def test_the_library_really_does_not_take_it(case: Case, tmp_path: Path) -> None:
    if case.verdict in ("refused", "fails"):
        with pytest.raises(BuildFailed) as caught:
            ask_library(case, tmp_path)
        assert caught.value.kind == ("refused" if case.verdict == "refused" else "failed")
    elif case.verdict == "dropped":
        with pytest.raises(BuildFailed) as caught:
            ask_library(case, tmp_path)
        assert caught.value.kind == "dropped"
    else:
        assert ask_library(case, tmp_path)["plan_bytes"] > 0


@pytest.mark.parametrize("case", [c for c in BAD if c.misread is not None], ids=names)
def test_what_is_accepted_and_misread_shows_in_the_parsed_network(case: Case, tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    assert case.verdict == "misread"
    path = tmp_path / "case.onnx"
    onnx.save(case.model(), path)
    builder = trt.Builder(make_logger(trt, []))
    network, _parser = parse(trt, builder, make_logger(trt, []), str(path))
    assert case.misread is not None
    assert case.misread(trt, network)


@pytest.mark.parametrize("case", GOOD, ids=names)
def test_what_tensorrt_takes_is_not_refused_and_builds(case: Case, tmp_path: Path) -> None:
    assert linting.errors(found(case)) == []
    assert ask_library(case, tmp_path)["plan_bytes"] > 0


def test_names_of_nodes_are_given_even_when_the_node_has_none() -> None:
    model = trt_cases.attention(softcap=3.0)
    model.graph.node[0].name = ""
    assert linting.errors(linting.lint(ir.from_proto(model)))[0].node == "output y"


def test_a_finding_inside_a_branch_is_found() -> None:
    body = trt_cases.unary("BitwiseNot", trt_cases.I32).graph
    del body.input[:]
    branch = trt_cases.helper.make_graph(body.node, "branch", [], body.output)
    outer = trt_cases.make(
        [trt_cases.node("If", ["c"], ["y2"], name="choice", then_branch=branch, else_branch=branch)],
        [("c", trt_cases.BOOL, []), ("x", trt_cases.I32, ["b", "s", 64])],
        [("y2", trt_cases.I32, ["b", "s", 64])],
    )
    assert [f.rule for f in linting.errors(linting.lint(ir.from_proto(outer)))] == ["operator", "operator"]


def test_a_block_size_without_known_kernels_is_a_note_and_not_an_error() -> None:
    findings = linting.lint(ir.from_proto(trt_cases.weight_only(block=8)))
    assert [(f.rule, f.effect) for f in findings] == [("dequantize-block", linting.NOTE)]
    assert linting.errors(findings) == []
    assert 8 not in INT4_BLOCKS


def test_blocked_dequantization_below_opset_21_is_refused() -> None:
    """NVIDIA/Model-Optimizer#156: an INT4 graph whose opset has no ``block_size`` fails the ONNX checker; TensorRT takes it."""
    model = trt_cases.weight_only(opset=20)
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(model, full_check=True)
    assert [f.rule for f in linting.errors(linting.lint(ir.from_proto(model)))] == ["dequantize-opset"]
    onnx.checker.check_model(trt_cases.weight_only(opset=21), full_check=True)


def test_the_model_given_to_the_lint_is_not_changed() -> None:
    model = ir.from_proto(trt_cases.mask_in_graph(8))
    before = ir.to_proto(model).SerializeToString()
    linting.lint(model, capabilities=("8.6",))
    assert ir.to_proto(model).SerializeToString() == before


def test_a_file_that_is_not_a_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with pytest.raises(ArtifactError, match="no such file"):
        linting.lint(path)
    path.write_bytes(b"\xff\xffnot a protobuf")
    with pytest.raises(ArtifactError, match=r"model\.onnx"):
        linting.lint(path)


def test_graph_inputs_are_read_with_numbers_and_symbols() -> None:
    inputs = linting.graph_inputs(ir.from_proto(trt_cases.extra_input("default")))
    assert inputs == {"x": ("b",)}
    assert linting.graph_inputs(ir.from_proto(trt_cases.scatter()))["cache"] == ("b", 2, 128, 64)


def test_an_input_with_a_nameless_dimension_is_refused_by_name() -> None:
    model = trt_cases.scatter()
    model.graph.input[1].type.tensor_type.shape.dim[2].Clear()
    with pytest.raises(UnsupportedError, match="update"):
        linting.graph_inputs(ir.from_proto(model))


def test_every_operator_the_lint_calls_unknown_is_unknown_to_the_parser(tmp_path: Path) -> None:
    """And no other standard operator is: the list is the parser's, except for importers whose plugin is missing."""
    trt = pytest.importorskip("tensorrt_rtx")
    from optkit.export.lint_rules import UNKNOWN

    logger = make_logger(trt, [])
    builder = trt.Builder(logger)
    parser = trt.OnnxParser(builder.create_network(0), logger)
    standard = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    refused = {name for name in standard if not parser.supports_operator(name)}
    plugins = {"NonZero", "LinearAttention", "CausalConvWithState"}
    newer_onnx = {"SwiGLU", "CumProd", "BitCast"} - standard
    assert refused - UNKNOWN == set()
    assert UNKNOWN - refused - newer_onnx <= plugins
