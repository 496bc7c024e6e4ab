"""ONNX Runtime's own promises: where the cache lives, how large it is, and which models of others it runs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from optkit.errors import LimitError
from optkit.runtime.backends.ort import OrtSession
from optkit.runtime.session import open_session


@pytest.fixture
def session(artifact: Callable[..., Path]) -> Iterator[OrtSession]:
    with open_session(artifact("llama"), threads=1) as opened:
        assert isinstance(opened, OrtSession)
        yield opened


def prompt(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(5, 120, (rows, length))


def test_past_and_present_are_one_buffer_at_one_address_in_every_step(session: OrtSession) -> None:
    """hip-ep#753, optimum#784: the cache was copied, or went through the host, on every token."""
    session.prefill(prompt(2, 10), capacity=100)
    first = session.cache.addresses()
    assert all(past == present for past, present in first)
    for token in range(5, 60):
        session.decode([token, token])
        assert session.cache.addresses() == first
    session.select([1])
    session.decode([5])
    session.truncate([20])
    session.extend(prompt(1, 6))
    assert session.cache.addresses() == first
    session.prefill(prompt(1, 12), capacity=100)  # the next request finds the memory there
    assert session.cache.addresses() == first


def test_a_step_writes_the_cache_in_place_and_only_its_own_slot(session: OrtSession) -> None:
    session.prefill(prompt(2, 10), [10, 7], capacity=40)
    before = [buffer.read().copy() for buffer in session.cache.buffers]
    session.decode([5, 6])
    for old, buffer in zip(before, session.cache.buffers, strict=True):
        changed = np.argwhere((old != buffer.read()).any(axis=(1, 3)))
        assert changed.tolist() == [[0, 10], [1, 7]]


def test_a_step_binds_and_allocates_nothing(session: OrtSession, monkeypatch: pytest.MonkeyPatch) -> None:
    session.prefill(prompt(1, 10), capacity=80)
    session.decode([5])
    monkeypatch.setattr(session.cache.engine, "binding", lambda: pytest.fail("a step made a binding"))
    buffer = session.decode([6], copy=False)
    address = buffer.ctypes.data
    for token in range(5, 50):
        assert session.decode([token], copy=False).ctypes.data == address


def test_the_cache_is_sized_to_the_request_not_to_the_model(artifact: Callable[..., Path]) -> None:
    """onnxruntime-genai#550, #980: 128k positions were allocated for a short request."""
    with open_session(artifact("llama", max_position_embeddings=131072), threads=1, max_seq_len=131072) as session:
        session.generate(prompt(1, 10), max_new_tokens=6, ignore_eos=True)
        assert session.kv_bytes < 1_000_000
        assert session.kv_bytes == session.cache_bytes(1, 32)
        tokens = session.generate(prompt(1, 10), max_new_tokens=200, ignore_eos=True)
        assert tokens.stats.kv_bytes == session.cache_bytes(1, 224)


def test_the_memory_limit_is_checked_before_anything_is_allocated(artifact: Callable[..., Path]) -> None:
    with open_session(artifact("llama"), threads=1, memory_limit=100_000) as session:
        session.generate(prompt(1, 10), max_new_tokens=20)
        held = session.kv_bytes
        with pytest.raises(LimitError, match=r"4 rows of 64 tokens needs 131,072 bytes, and memory_limit is 100,000"):
            session.generate(prompt(4, 10), max_new_tokens=50)
        assert session.kv_bytes == held
        session.prefill(prompt(2, 90))
        for _ in range(6):
            session.decode([5, 5])
        with pytest.raises(LimitError, match="memory_limit"):  # 97 tokens need a larger cache
            session.decode([5, 5])


def test_a_much_smaller_request_gives_the_memory_back(session: OrtSession) -> None:
    session.prefill(prompt(4, 200))
    large = session.kv_bytes
    session.prefill(prompt(1, 8))
    assert session.kv_bytes < large / 8


def test_many_calls_do_not_grow_the_process(session: OrtSession) -> None:
    import psutil

    def calls(count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(count):
            lengths = rng.integers(1, 40, rng.integers(1, 4))
            session.generate([rng.integers(5, 120, n).tolist() for n in lengths], max_new_tokens=int(rng.integers(1, 30)))

    calls(60, 0)
    gc.collect()
    before = psutil.Process().memory_info().rss
    calls(200, 1)
    gc.collect()
    # a leak of one tiny cache (64 KiB) per call would be 13 MB
    assert psutil.Process().memory_info().rss - before < 4_000_000


# half precision: 11 bits of mantissa through two layers; 3e-3 of the range measured
HALF = 1e-2


def test_half_precision_caches_run_and_take_half_the_memory(
    artifact: Callable[..., Path], checkpoint: Callable[..., Path]
) -> None:
    ids, lengths = prompt(2, 12), [12, 5]
    with (
        open_session(checkpoint("llama"), threads=1) as exact,
        open_session(artifact("llama", dtype="fp16"), threads=1) as half,
    ):
        assert half.cache_bytes(1, 32) == exact.cache_bytes(1, 32) / 2
        steps = [(exact.prefill(ids, lengths), half.prefill(ids, lengths))]
        steps += [(exact.decode([token, 9]), half.decode([token, 9])) for token in range(5, 10)]
    for want, found in steps:
        assert found.dtype == np.float32
        assert 0 < np.abs(found - want).max() < HALF * np.ptp(want)


def test_the_portable_target_runs_in_place_too(artifact: Callable[..., Path], checkpoint: Callable[..., Path]) -> None:
    ids = prompt(1, 9)
    with (
        open_session(checkpoint("llama"), threads=1) as exact,
        open_session(artifact("llama", target="onnx"), threads=1) as session,
    ):
        want = exact.prefill(ids)
        assert np.abs(session.prefill(ids, capacity=40) - want).max() < 1e-5 * np.ptp(want)
        assert all(past == present for past, present in session.cache.addresses())  # type: ignore[attr-defined]
        want = exact.decode([7])
        assert np.abs(session.decode([7]) - want).max() < 1e-5 * np.ptp(want)
        assert session.generate(ids, max_new_tokens=20).tokens == exact.generate(ids, max_new_tokens=20).tokens
