"""Backend ``trt`` over the stand-in engine: the contract of every backend, and the promises to the library.

The graph is a decoder in the exporter's dialect with the weights of a tiny transformers model, so that the oracle is
transformers again. Float32 here: it shows every slip of bookkeeping, and ONNX Runtime's float16 would hide small ones.
"""

from __future__ import annotations

import ctypes.util
import dataclasses
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from optkit import cuda, manifest
from optkit.errors import ArtifactError, DependencyError, EngineError, LimitError, UnsupportedError, UsageError
from optkit.export.lint import graph_inputs
from optkit.export.profiles import solve_profiles
from optkit.export.run import export
from optkit.io_spec import CacheSpec, GraphSpec
from optkit.manifest import Manifest, ModelSpec
from optkit.runtime.backends import _trt_device, trt
from optkit.runtime.backends._trt_device import CudartDevice, HostDevice, TorchDevice
from optkit.runtime.session import Session, open_session
from tests import tiny, trt_cases
from tests.runtime import standin
from tests.runtime.test_contract import *  # noqa: F403  the same tests, over the fixtures below
from tests.runtime.test_contract import tokens

MAX_BATCH, MAX_PREFILL = 4, 256
# (model, how its graph is written): by hand, giving the logits of logits_positions or of the last token only, as older
# artifacts do; and by the exporter, with the static and with the growing cache
MODELS = [("llama", "positions"), ("mistral", "last"), ("gemma2", "scatter"), ("mistral", "growing")]
# Largest logit error over the logit range, float16 graph against float32 model: 2.1e-3 to 3.1e-3 measured
FLOAT16_OF_RANGE = 8e-3


def graph_spec(config: Any, dtype: str, **changes: Any) -> GraphSpec:
    shape = (None, config.num_key_value_heads, tiny.POSITIONS, config.head_dim)
    caches = [CacheSpec(i, role, shape, dtype) for i in range(config.num_hidden_layers) for role in ("key", "value")]
    return GraphSpec("scatter", tuple(caches), dtype, tiny.POSITIONS, **changes)


def model_spec(config: Any) -> ModelSpec:
    return ModelSpec(
        config.model_type,
        config.num_hidden_layers,
        config.hidden_size,
        config.vocab_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        tiny.POSITIONS,
        eos_token_ids=(tiny.EOS,),
    )


def write_artifact(directory: Path, name: str, bits: int = 16, dtype: Any = np.float32, last_only: bool = False) -> Path:
    """An artifact for target tensorrt whose engine is a placeholder: the stand-in reads the ONNX beside it."""
    model = tiny.build(name)
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    window = tiny.WINDOW if name == "mistral" else None
    graph = trt_cases.decoder(
        state, model.config, dtype=dtype, bits=bits, window=window, slots=tiny.POSITIONS, last_only=last_only
    )
    directory.mkdir(parents=True)
    onnx.save(graph, directory / "model.onnx")
    (directory / trt.PLAN_FILE).write_bytes(b"stand-in")
    facts = {
        "target": "tensorrt",
        "graph": graph_spec(model.config, np.dtype(dtype).name).to_dict(),
        "model_file": "model.onnx",
    }
    manifest.write_manifest(directory, Manifest("artifact", {}, {}, {}, model_spec(model.config), facts))
    return directory


def stand_in(directory: Path, max_prefill: int = MAX_PREFILL, count: int = 2) -> standin.Engine:
    path = directory / "model.onnx"
    found = solve_profiles(graph_inputs(path), max_seq_len=tiny.POSITIONS, max_batch=MAX_BATCH, max_prefill=max_prefill)
    return standin.Engine(path, [p.shapes for p in found[:count]])


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    """Every plan opens as the stand-in; nothing else of the backend is replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trt, "load_engine", lambda plan, *options: (stand_in(plan.parent), HostDevice(), None))
        yield


@pytest.fixture(scope="module", params=MODELS, ids=lambda given: f"trt-{given[0]}-{given[1]}")
def given(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(scope="module")
def case(given: tuple[str, str]) -> tuple[str, str]:
    return "trt", given[0]


def export_artifact(checkpoint: Path, out: Path, **options: Any) -> Path:
    """By the exporter; its engine is a placeholder."""
    export(checkpoint, out_dir=out, target="tensorrt", **options)
    (out / trt.PLAN_FILE).write_bytes(b"stand-in")
    return out


@pytest.fixture(scope="module")
def path(given: tuple[str, str], tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> Path:
    name, way = given
    out = tmp_path_factory.mktemp("trt") / name
    if way in ("scatter", "growing"):
        return export_artifact(checkpoint(name), out, cache_layout=way)
    return write_artifact(out, name, last_only=way == "last")


@pytest.fixture(scope="module")
def session(path: Path) -> Iterator[Session]:
    with open_session(path, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifact(tmp_path_factory.mktemp("trt-llama") / "llama", "llama")


def open_trt(directory: Path, engine: Any = None, device: Any = None, **options: Any) -> trt.TrtSession:
    graph, spec = trt._described(directory)
    limits = trt.SessionLimits(**options)
    return trt.make_session(engine or stand_in(directory), device or HostDevice(), graph, spec, directory, limits)


# ---------------------------------------------------------------- beyond the contract


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_the_dialect_in_half_precision_computes_the_model_with_the_same_rounded_weights(tmp_path: Path, bits: int) -> None:
    """The oracle is transformers in float32 with the weights the codes stand for: only float16 arithmetic is between."""
    import torch

    ids = tokens(1, 24)
    model = tiny.build("llama")
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    model.load_state_dict({key: torch.from_numpy(value) for key, value in trt_cases.rounded(state, bits).items()})
    with torch.inference_mode():
        want = model(input_ids=torch.from_numpy(ids), use_cache=False).logits[0].numpy()
    with open_session(write_artifact(tmp_path / "a", "llama", bits, np.float16)) as session:
        logits = session.prefill(ids, logits="all")[0]
    assert np.abs(logits - want).max() / np.ptp(want) < FLOAT16_OF_RANGE


def test_generate_gives_the_tokens_of_transformers(llama: Path) -> None:
    import torch

    ids = tokens(1, 7)
    model = tiny.build("llama")
    with torch.inference_mode():
        want = model.generate(torch.from_numpy(ids), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    with open_trt(llama) as session:
        logits = session.prefill(ids)
        got = []
        for _ in range(12):
            got.append(int(logits[0].argmax()))
            logits = session.decode([got[-1]])
    assert got == want[0, 7:].tolist()


def test_n_tokens_cost_one_prefill_and_n_minus_one_decodes(llama: Path) -> None:
    engine = stand_in(llama)
    with open_trt(llama, engine) as session:
        session.prefill(tokens(1, 7))
        for _ in range(5):
            session.decode([5])
    assert engine.runs == 6


def test_a_decode_step_sets_no_shape_and_no_address(llama: Path) -> None:
    with open_trt(llama) as session:
        session.prefill(tokens(2, 5))
        session.decode([5, 6])
        calls = session._decode.context.calls
        calls.clear()
        session.decode([7, 8])
        assert calls == ["execute_async_v3"]
        session.prefill(tokens(2, 9))
        calls.clear()
        session.decode([7, 8])
        assert calls == ["execute_async_v3"], "a prefill does not disturb the decode context"


def test_a_prompt_longer_than_the_prefill_profile_is_read_in_pieces(llama: Path) -> None:
    ids, lengths = tokens(3, 40), [40, 3, 17]
    with open_trt(llama) as whole, open_trt(llama, stand_in(llama, max_prefill=16)) as pieces:
        np.testing.assert_allclose(pieces.prefill(ids, lengths), whole.prefill(ids, lengths), atol=2e-5)


@pytest.mark.parametrize("logits", ["last", "all"])
@pytest.mark.parametrize("last_only", [False, True])
def test_padding_that_would_leave_the_cache_is_moved_and_the_answer_is_the_same(
    tmp_path: Path, llama: Path, logits: str, last_only: bool
) -> None:
    """The library drops writes beyond S_max in silence; the stand-in raises for them."""
    full, short = tiny.POSITIONS - 3, 20
    ids = tokens(2, full)
    more = tokens(2, 9, seed=4)
    with open_trt(write_artifact(tmp_path / "a", "llama", last_only=True) if last_only else llama) as session:
        session.prefill(ids, [full, short])
        both = session.extend(more, [3, 9], logits)
        session.prefill(ids[:1, :full])
        alone = session.extend(more[:1, :3], logits=logits)
        session.prefill(ids[1:, :short])
        other = session.extend(more[1:], logits=logits)
    np.testing.assert_allclose(both[0, :3] if logits == "all" else both[0], alone[0], atol=2e-5)
    np.testing.assert_allclose(both[1], other[0], atol=2e-5)


def test_more_rows_than_the_profile_has_are_refused_before_anything_runs(llama: Path) -> None:
    engine = stand_in(llama)
    with open_trt(llama, engine) as session, pytest.raises(LimitError, match="max_batch is 4"):
        session.prefill(tokens(MAX_BATCH + 1, 3))
    assert engine.runs == 0


def test_one_profile_is_enough(llama: Path) -> None:
    ids = tokens(2, 9)
    with open_trt(llama, stand_in(llama, count=1)) as one, open_trt(llama) as two:
        np.testing.assert_array_equal(one.prefill(ids), two.prefill(ids))
        np.testing.assert_array_equal(one.decode([5, 6]), two.decode([5, 6]))


def test_cache_memory_is_what_the_plan_needs_and_is_kept_for_smaller_batches(llama: Path) -> None:
    with open_trt(llama) as session:
        session.prefill(tokens(3, 5))
        row = 2 * 2 * 2 * tiny.POSITIONS * 16 * 4  # layers, key and value, heads, slots, head_dim, float32
        assert session.kv_bytes == 3 * row
        first = dict(session._caches)
        session.prefill(tokens(2, 5))
        assert session._caches == first
        session.prefill(tokens(4, 5))
        assert session.kv_bytes == 4 * row


def test_a_cache_poisoned_with_nan_does_not_reach_the_next_request(llama: Path) -> None:
    """An old NaN times a masked zero is a NaN: the cache starts from zeros for every new prompt."""
    ids = tokens(1, 6)
    with open_trt(llama) as session:
        want = session.prefill(ids)
        for buffer in session._caches.values():
            buffer.owner.view(np.float32)[:] = np.nan
        np.testing.assert_array_equal(session.prefill(ids), want)


def test_the_padding_of_other_requests_does_not_show_in_a_row(llama: Path) -> None:
    """onnxruntime-genai#1604: a cache shared with what was there before read stale slots."""
    ids = tokens(2, 30)
    with open_trt(llama) as session:
        session.prefill(ids, [30, 2])
        session.decode([5, 6])
        ragged = session.decode([7, 8])[1]
        session.prefill(ids[1:, :2])
        session.decode([6])
        np.testing.assert_allclose(session.decode([8])[0], ragged, atol=2e-5)


# ---------------------------------------------------------------- a cache that grows


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> Path:
    return export_artifact(checkpoint("mistral"), tmp_path_factory.mktemp("growing") / "a", cache_layout="growing")


def test_a_growing_cache_takes_what_the_request_needs_and_its_buffers_swap(growing: Path) -> None:
    with open_trt(growing) as session:
        session.prefill(tokens(2, 5), capacity=40)
        token = 2 * 2 * 2 * 16 * 4  # layers, key and value, heads, head_dim, float32
        assert session.kv_bytes == 2 * 2 * session.capacity * token
        pair = list(session._pairs["past_key_values.0.key"])
        session.decode([5, 6])
        assert session._pairs["past_key_values.0.key"] == pair[::-1]
        assert "other shapes" in session.cuda_graph


def test_a_full_row_does_not_keep_its_neighbour_from_going_on(growing: Path) -> None:
    """For that run there are more columns than max_seq_len."""
    ids = tokens(2, tiny.POSITIONS)
    with open_trt(growing) as session:
        session.prefill(ids, [tiny.POSITIONS, 20])
        both = session.extend(ids[:, :30], [0, 30])
        alone = session.prefill(np.concatenate([ids[1:, :20], ids[1:, :30]], axis=1))
    np.testing.assert_allclose(both[1], alone[0], atol=2e-5)


def test_what_an_earlier_request_left_in_a_growing_cache_does_not_show(growing: Path) -> None:
    ids = tokens(2, 9)
    with open_trt(growing) as session:
        want = [session.prefill(ids, [9, 4]), session.extend(ids[:, :4], [1, 4]), session.decode([5, 6])]
        for pair in session._pairs.values():
            for buffer in pair:
                buffer.owner.view(np.float32)[:] = np.nan
        for ours, expected in zip(
            [session.prefill(ids, [9, 4]), session.extend(ids[:, :4], [1, 4]), session.decode([5, 6])], want, strict=True
        ):
            np.testing.assert_array_equal(ours, expected)


def test_the_stand_in_sees_a_growing_cache_written_where_it_is_read(growing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_trt(growing) as session:
        session.prefill(tokens(1, 4))
        for pair in session._pairs.values():
            pair[1] = pair[0]
        with pytest.raises(standin.ContractBroken, match="written where an input is read"):
            session.decode([5])


# ---------------------------------------------------------------- choosing on the device


@pytest.mark.parametrize("way", ["scatter", "growing"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "top_k": 5, "seed": 3},
        {"do_sample": True, "top_k": 9, "top_p": 0.8, "temperature": 1.7, "seed": 4},
    ],
    ids=["greedy", "top-k", "top-k and top-p"],
)
def test_tokens_chosen_on_the_device_are_those_chosen_on_the_host(
    way: str, options: dict[str, Any], growing: Path, llama: Path
) -> None:
    path = growing if way == "growing" else llama
    prompts = [tokens(7).tolist(), tokens(3, seed=1).tolist(), tokens(12, seed=2).tolist()]
    answers = []
    for sampling in (False, True):
        device = TorchDevice("cpu")
        asked: list[int] = []
        search = device.largest
        device.largest = lambda *a, s=search, q=asked: q.append(a[-1]) or s(*a)  # type: ignore[method-assign, misc]
        graph, spec = trt._described(path)
        with trt.make_session(stand_in(path), device, graph, spec, path, device_sampling=sampling) as session:
            answers.append(session.generate(prompts, max_new_tokens=9, ignore_eos=True, **options).tokens)
        assert asked == ([options.get("top_k", 1) + 1] * 8 if sampling else [])
    assert answers[0] == answers[1]


def test_equal_logits_at_the_border_and_nan_are_left_to_the_host(llama: Path) -> None:
    graph, spec = trt._described(llama)
    device = TorchDevice("cpu")
    with trt.make_session(stand_in(llama), device, graph, spec, llama, device_sampling=True) as session:
        session.prefill(tokens(2, 5))
        full = session.decode([5, 6]).copy()
        session.truncate([5, 5])
        few = session.decode([5, 6], top=3)
        for row in range(2):
            kept = np.flatnonzero(few[row] > -np.inf)
            np.testing.assert_array_equal(np.sort(kept), np.sort(np.argsort(-full[row])[:3]))
            np.testing.assert_array_equal(few[row, kept], full[row, kept])
        search = device.largest

        def tied(*arguments: Any) -> Any:
            values, columns = search(*arguments)
            values[1, -1] = values[1, -2]
            return values, columns

        device.largest = tied  # type: ignore[method-assign]
        session.truncate([5, 5])
        np.testing.assert_array_equal(session.decode([5, 6], top=3), full)

        def broken(*arguments: Any) -> Any:
            values, columns = search(*arguments)
            values[0, 0] = np.nan
            return values, columns

        device.largest = broken  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="NaN"):
            session.decode([5, 6], top=3)


def test_without_kernels_the_host_chooses(llama: Path) -> None:
    graph, spec = trt._described(llama)
    with (
        trt.make_session(stand_in(llama), HostDevice(), graph, spec, llama, device_sampling=True) as ours,
        open_trt(llama) as plain,
    ):
        for session in (ours, plain):
            session.prefill(tokens(1, 5))
        np.testing.assert_array_equal(ours.decode([5], top=1), plain.decode([5]))


# ---------------------------------------------------------------- the stand-in holds the caller to the contract


def test_the_stand_in_refuses_what_the_library_forbids(llama: Path) -> None:
    engine = stand_in(llama)
    context = engine.create_execution_context()
    with pytest.raises(standin.ContractBroken, match="profile"):
        context.set_input_shape("input_ids", (1, 4))
    assert context.set_optimization_profile_async(0, 0)
    assert not context.set_input_shape("input_ids", (MAX_BATCH + 1, 4))
    assert not context.set_input_shape("input_ids", (1, MAX_PREFILL + 1))
    assert not context.set_optimization_profile_async(2, 0)
    with pytest.raises(standin.ContractBroken, match="another context"):
        engine.create_execution_context().set_optimization_profile_async(0, 0)
    assert not context.execute_async_v3(0), "nothing is bound"


def test_the_stand_in_sees_a_cache_that_is_not_updated_in_place(llama: Path) -> None:
    with open_trt(llama) as session:
        session.prefill(tokens(1, 4))
        other = np.zeros(1 << 20, np.uint8)
        session._decode.context.set_tensor_address("present.0.key", other.ctypes.data)
        with pytest.raises(standin.ContractBroken, match=r"present\.0\.key"):
            session.decode([5])


def test_the_stand_in_sees_a_write_beyond_the_cache(llama: Path) -> None:
    with open_trt(llama) as session:
        session.prefill(tokens(1, 4))
        one = np.ones(1, np.int64)
        with pytest.raises(standin.ContractBroken, match="slots"):
            session._enqueue(session._decode, np.array([[5]]), tiny.POSITIONS * one, one, 0 * one, False)


# ---------------------------------------------------------------- wrong engines and artifacts


def test_an_artifact_without_an_engine_says_how_to_finish_it(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "a")
    (tmp_path / "a" / trt.PLAN_FILE).unlink()
    with pytest.raises(ArtifactError, match="--build-only"):
        open_session(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.alias.clear(), "in place"),
        (lambda e: e.names.remove("write_indices"), "write_indices"),
        (lambda e: e.names.append("extra") or e.ins.update(extra=e.ins["write_indices"]), "extra"),
        (lambda e: setattr(e, "get_tensor_location", lambda name: standin.TensorLocation.HOST), "host memory"),
    ],
)
def test_an_engine_of_another_contract_is_refused_with_what_differs(
    llama: Path, change: Callable[..., Any], message: str
) -> None:
    engine = stand_in(llama)
    change(engine)
    with pytest.raises(ArtifactError, match=message):
        open_trt(llama, engine)


def test_a_cache_of_another_length_is_refused(llama: Path) -> None:
    graph, spec = trt._described(llama)
    with pytest.raises(ArtifactError, match="256 slots"):
        trt.TrtSession(
            stand_in(llama), HostDevice(), dataclasses.replace(graph, max_seq_len=512), spec, llama, trt.SessionLimits()
        )


def test_another_cache_layout_is_refused(llama: Path) -> None:
    graph, spec = trt._described(llama)
    with pytest.raises(UnsupportedError, match="slots"):
        trt.make_session(stand_in(llama), HostDevice(), dataclasses.replace(graph, layout="slots"), spec, llama)
    with pytest.raises(ArtifactError, match="attention_mask"):
        trt.make_session(stand_in(llama), HostDevice(), dataclasses.replace(graph, layout="growing"), spec, llama)
    state = dataclasses.replace(graph.caches[0], role="conv_state")
    with pytest.raises(UnsupportedError, match="with conv_state"):
        trt.make_session(stand_in(llama), HostDevice(), dataclasses.replace(graph, caches=(state,)), spec, llama)


def test_an_engine_that_does_not_run_raises_an_engine_error(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_trt(llama) as session:
        session.prefill(tokens(1, 4))
        monkeypatch.setattr(standin.Context, "execute_async_v3", lambda self, stream: False)
        with pytest.raises(EngineError, match="did not run"):
            session.decode([5])


def test_a_context_that_cannot_be_created_is_a_limit(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin.Engine, "create_execution_context", lambda self: None)
    with pytest.raises(LimitError, match="memory"):
        open_trt(llama)


def test_a_prefill_profile_too_small_for_a_rotary_switch_is_refused(llama: Path) -> None:
    graph, spec = trt._described(llama)
    graph = dataclasses.replace(graph, rope_switch=64)
    with pytest.raises(UnsupportedError, match="max_prefill"):
        trt.TrtSession(stand_in(llama, max_prefill=32), HostDevice(), graph, spec, llama, trt.SessionLimits())


def test_an_unknown_option_is_refused(llama: Path) -> None:
    with pytest.raises(UsageError, match="cuda_graphs"):
        open_session(llama, cuda_graph=True)


# ---------------------------------------------------------------- devices

DEVICES = [HostDevice, lambda: TorchDevice("cpu")]


@pytest.mark.parametrize("make", DEVICES, ids=["host", "torch"])
def test_a_device_copies_and_clears_bytes(make: Callable[[], Any]) -> None:
    device = make()
    buffer = device.allocate(64)
    read = np.full(64, 9, np.uint8)
    device.download(read, buffer.address)
    assert not read.any(), "memory starts as zeros"
    device.upload(buffer.address + 8, np.arange(8, dtype=np.uint8))
    device.copy(buffer.address + 32, buffer.address + 8, 8)
    device.zero(buffer.address + 8, 4)
    device.download(read, buffer.address)
    device.synchronize()
    np.testing.assert_array_equal(read[8:16], [0, 0, 0, 0, 4, 5, 6, 7])
    np.testing.assert_array_equal(read[32:40], np.arange(8))
    device.free(buffer)
    device.close()


def test_the_session_runs_on_torch_memory_as_on_host_memory(llama: Path) -> None:
    ids = tokens(2, 9)
    with open_trt(llama) as host, open_trt(llama, device=TorchDevice("cpu")) as torch_memory:
        np.testing.assert_array_equal(torch_memory.prefill(ids, [9, 4]), host.prefill(ids, [9, 4]))
        host.select([1, 0, 1]), torch_memory.select([1, 0, 1])
        np.testing.assert_array_equal(torch_memory.decode([5, 6, 7]), host.decode([5, 6, 7]))


def test_an_address_outside_the_session_s_memory_is_an_error() -> None:
    device = TorchDevice("cpu")
    buffer = device.allocate(16)
    with pytest.raises(EngineError, match="not in a buffer"):
        device.zero(buffer.address + 8, 16)


class FakeCudart:
    """``cuda.bindings.runtime`` over host memory: the same calling convention, and a log of the calls."""

    cudaStreamNonBlocking = 1
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
    cudaError_t = SimpleNamespace(cudaErrorMemoryAllocation=2)

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.log: list[str] = []
        self.fail: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.log.append(name)
            if name in self.fail:
                return (self.fail[name], None)
            return (0, *getattr(self, "_" + name, lambda *a: ())(*arguments))

        if not name.startswith("cuda"):
            raise AttributeError(name)
        return call

    def cudaStream_t(self, handle: int) -> int:
        return handle

    def _cudaStreamCreateWithFlags(self, flags: int) -> tuple[int]:
        return (77,)

    def _cudaMalloc(self, size: int) -> tuple[int]:
        array = np.full(size, 255, np.uint8)
        self.memory[array.ctypes.data] = array
        return (array.ctypes.data,)

    def _cudaFree(self, address: int) -> tuple[()]:
        del self.memory[address]
        return ()

    def _cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> tuple[()]:
        _trt_device._host(target, size)[:] = _trt_device._host(source, size)
        return ()

    def _cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> tuple[()]:
        _trt_device._host(address, size)[:] = value
        return ()

    def _cudaStreamEndCapture(self, stream: int) -> tuple[str]:
        return ("graph",)

    def _cudaGraphInstantiate(self, graph: str, flags: int) -> tuple[str]:
        return ("executable",)


class CapturingEngine(standin.Engine):
    """Enqueues during a capture are recorded and not run; a launch of the graph runs them."""

    def __init__(self, *arguments: Any, runtime: FakeCudart) -> None:
        super().__init__(*arguments)
        self.runtime = runtime
        self.recorded: Callable[[], None] | None = None

    def create_execution_context(self) -> standin.Context:
        context = super().create_execution_context()
        execute = context.execute_async_v3

        def enqueue(stream: int) -> bool:
            log = self.runtime.log
            begun, ended = log.count("cudaStreamBeginCapture"), log.count("cudaStreamEndCapture")
            if begun > ended:
                self.runtime._cudaGraphLaunch = lambda *a: execute(stream) and ()
                return True
            return execute(stream)

        context.execute_async_v3 = enqueue  # type: ignore[method-assign]
        context.is_stream_capturable = lambda stream: True  # type: ignore[attr-defined]
        return context


def capturing(directory: Path) -> tuple[FakeCudart, CapturingEngine]:
    runtime = FakeCudart()
    found = solve_profiles(graph_inputs(directory / "model.onnx"), max_seq_len=tiny.POSITIONS, max_batch=MAX_BATCH)
    return runtime, CapturingEngine(directory / "model.onnx", [p.shapes for p in found], runtime=runtime)


def test_decode_steps_are_captured_once_and_then_launched_as_a_graph(llama: Path) -> None:
    runtime, engine = capturing(llama)
    ids = tokens(2, 9)
    with open_trt(llama) as plain, open_trt(llama, engine, CudartDevice(runtime)) as session:
        assert session.cuda_graph == "not captured yet"
        for _ in range(2):
            np.testing.assert_array_equal(session.prefill(ids), plain.prefill(ids))
            for token in (5, 6, 7, 8):
                np.testing.assert_array_equal(session.decode([token, token + 1]), plain.decode([token, token + 1]))
        assert session.cuda_graph == "captured"
        assert runtime.log.count("cudaStreamBeginCapture") == 1, "a new prompt of the same batch keeps the graph"
        assert runtime.log.count("cudaGraphLaunch") == 7
        session.prefill(ids[:1])
        session.decode([5])
        session.decode([6])
        assert runtime.log.count("cudaStreamBeginCapture") == 2, "another batch has other shapes"
        assert runtime.log.count("cudaGraphExecDestroy") == 1
    assert runtime.memory == {}, "everything is freed"


def test_an_engine_that_cannot_be_captured_says_so_and_runs(llama: Path) -> None:
    runtime, engine = capturing(llama)
    with open_trt(llama, engine, CudartDevice(runtime)) as session:
        session._decode.context.is_stream_capturable = lambda stream: False
        session.prefill(tokens(1, 4))
        session.decode([5])
        session.decode([6])
        assert "cannot be captured" in session.cuda_graph
        assert runtime.log.count("cudaStreamBeginCapture") == 0


def test_a_full_device_is_a_limit_and_any_other_failure_an_engine_error() -> None:
    runtime = FakeCudart()
    device = CudartDevice(runtime)
    runtime.fail["cudaMalloc"] = 2
    with pytest.raises(LimitError, match="cudaMalloc"):
        device.allocate(10)
    runtime.fail["cudaMalloc"] = 35
    with pytest.raises(EngineError, match="cudaMalloc"):
        device.allocate(10)


# ---------------------------------------------------------------- this machine, and names of the libraries


def test_opening_a_real_plan_without_a_driver_says_so_before_importing_a_library(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _load_engine_itself()
    monkeypatch.setattr(cuda, "_ask", lambda: "no NVIDIA driver is installed (libcuda is not found)")
    before = set(sys.modules)
    with pytest.raises(UnsupportedError, match="no NVIDIA driver"):
        real(llama / trt.PLAN_FILE)
    assert not {m for m in set(sys.modules) - before if m.startswith("tensorrt")}


def _load_engine_itself() -> Callable[..., Any]:
    spec = importlib.util.find_spec("optkit.runtime.backends.trt")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load_engine  # type: ignore[no-any-return]


def test_without_a_library_for_device_memory_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(_trt_device.importlib, "import_module", missing)
    with pytest.raises(DependencyError, match="cuda-python"):
        _trt_device.find_device()


#: every name of the library the backend and the builder use, by class
USED = {
    "Runtime": ("deserialize_cuda_engine",),
    "ICudaEngine": (
        "num_io_tensors",
        "num_optimization_profiles",
        "get_tensor_name",
        "get_tensor_mode",
        "get_tensor_dtype",
        "get_tensor_shape",
        "get_tensor_location",
        "get_tensor_profile_shape",
        "get_aliased_input_tensor",
        "create_execution_context",
    ),
    "IExecutionContext": (
        "set_optimization_profile_async",
        "set_input_shape",
        "infer_shapes",
        "get_tensor_shape",
        "set_tensor_address",
        "execute_async_v3",
    ),
    "ILogger": ("log", "Severity"),
}
USED_TO_BUILD = {
    "Builder": ("create_network", "create_builder_config", "create_optimization_profile", "build_serialized_network"),
    "OnnxParser": ("parse_from_file", "num_errors", "get_error"),
    "ParserError": ("node", "node_name", "node_operator", "desc"),
    "INetworkDefinition": ("num_layers", "num_inputs", "num_outputs", "get_layer", "get_input", "get_output"),
    "ILayer": ("num_inputs", "num_outputs", "get_input", "get_output", "type", "name"),
    "IAttention": ("decomposable", "causal", "causal_kind", "mask"),
    "IOptimizationProfile": ("set_shape",),
    "IProgressMonitor": ("phase_start", "step_complete", "phase_finish"),
    "IBuilderConfig": (
        "set_memory_pool_limit",
        "builder_optimization_level",
        "set_flag",
        "add_optimization_profile",
        "create_timing_cache",
        "set_timing_cache",
        "get_timing_cache",
        "progress_monitor",
    ),
    "ITimingCache": ("serialize",),
    "BuilderFlag": ("ERROR_ON_TIMING_CACHE_MISS",),
    "NetworkDefinitionCreationFlag": ("STRONGLY_TYPED",),
    "MemoryPoolType": ("WORKSPACE",),
    "LayerType": ("ATTENTION_INPUT", "KV_CACHE_UPDATE"),
}
#: and what only TensorRT-RTX has
USED_OF_RTX = {
    "IBuilderConfig": ("num_compute_capabilities", "set_compute_capability"),
    "IExecutionContext": ("is_stream_capturable",),
    "ComputeCapability": ("SM75", "SM80", "SM86", "SM89", "SM120", "SM121"),
}
PROBE = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
library = importlib.import_module(sys.argv[2])
names = json.loads(sys.argv[3])
print(json.dumps([f"{c}.{m}" for c, ms in names.items() for m in ms if not hasattr(getattr(library, c, None), m)]))
"""
#: the C functions the Python bindings take from the library proper
STUBS = (
    "createInferBuilder_INTERNAL createInferRefitter_INTERNAL createInferRuntime_INTERNAL createNvOnnxParserRefitter_INTERNAL "
    "createNvOnnxParser_INTERNAL getBuilderPluginRegistry getPluginRegistry getNvOnnxParserVersion initLibNvInferPlugins"
)


def merged(*tables: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    result: dict[str, tuple[str, ...]] = {}
    for table in tables:
        for name, members in table.items():
            result[name] = (*result.get(name, ()), *members)
    return result


def test_every_name_used_exists_in_tensorrt_rtx() -> None:
    library = pytest.importorskip("tensorrt_rtx")
    missing = [
        f"{c}.{m}"
        for c, ms in merged(USED, USED_TO_BUILD, USED_OF_RTX).items()
        for m in ms
        if not hasattr(getattr(library, c, None), m)
    ]
    assert missing == []


@pytest.mark.parametrize(("module", "tables"), [("tensorrt_lean", (USED,)), ("tensorrt", (USED, USED_TO_BUILD))])
def test_every_name_used_exists_in_standard_tensorrt(module: str, tables: Any, tmp_path: Path) -> None:
    """Standard TensorRT's libraries cannot be installed here, but its Python bindings can: nine C functions are stubbed.

    The classes are then the real ones; none is instantiated.
    """
    import json

    bindings = importlib.util.find_spec(f"{module}_bindings")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if bindings is None or bindings.submodule_search_locations is None:
        pytest.skip(f"the bindings are not installed: pip install --no-deps {module.replace('_', '-')}-cu13-bindings")
    if compiler is None:
        pytest.skip("needs a C compiler for the stub")
    source = tmp_path / "stub.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in STUBS.split()))
    folder = next(iter(bindings.submodule_search_locations))
    version = importlib.metadata.version(f"{module}_cu13_bindings").split(".")[0]
    for name in ("nvinfer_lean", "nvinfer", "nvonnxparser", "nvinfer_plugin"):
        library = tmp_path / f"lib{name}.so.{version}"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, f"-Wl,-soname,{library.name}", source], check=True)
    result = subprocess.run(
        [sys.executable, "-c", PROBE, folder, module, json.dumps(merged(*tables))],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == []


def test_every_cuda_name_used_exists_in_cuda_bindings() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    functions = (
        "cudaStreamCreateWithFlags cudaMalloc cudaFree cudaMemcpyAsync cudaMemsetAsync cudaStreamSynchronize "
        "cudaStreamBeginCapture cudaStreamEndCapture cudaGraphInstantiate "
        "cudaGraphDestroy cudaGraphLaunch cudaGraphExecDestroy cudaStreamDestroy"
    )
    for name in functions.split():
        assert callable(getattr(runtime, name)), name
    assert int(runtime.cudaStreamNonBlocking) == 1
    assert int(runtime.cudaError_t.cudaErrorMemoryAllocation) == 2
    assert runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal is not None
    for kind in ("HostToDevice", "DeviceToHost", "DeviceToDevice"):
        assert hasattr(runtime.cudaMemcpyKind, f"cudaMemcpy{kind}")
    assert int(runtime.cudaStream_t(5)) == 5


@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="this machine has a driver")
def test_cuda_without_a_driver_is_an_engine_error_and_not_a_crash() -> None:
    pytest.importorskip("cuda.bindings.runtime")
    with pytest.raises((EngineError, RuntimeError)):
        CudartDevice()
