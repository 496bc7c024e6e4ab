"""Memory, copies, streams and graphs for the ``trt`` backend: a small device, three times.

The backend only needs an address it can give to the engine, copies in stream order, and the capture of one launch. That is

``CudartDevice``  ``cuda.bindings.runtime`` (pip install cuda-python): no torch in a deployment.
``TorchDevice``   torch CUDA tensors, where torch is there anyway.
``HostDevice``    host memory, for an engine that runs on the host (the tests' stand-in).

All three hand out zero-filled memory: the engine reads cache slots that were never written (and masks them), and an
uninitialized NaN times zero is NaN.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from optkit.errors import DependencyError, EngineError, LimitError

Array = NDArray[Any]


@dataclass(frozen=True)
class Buffer:
    """Device memory: its address, size, and whatever keeps it alive."""

    address: int
    nbytes: int
    owner: Any = None


@dataclass(frozen=True)
class Captured:
    """A recorded launch; :meth:`destroy` frees what it holds."""

    launch: Callable[[], None]
    destroy: Callable[[], None]


class Device(Protocol):
    """What the backend asks of a device. ``stream`` is the handle the engine enqueues on."""

    name: str
    stream: int

    def allocate(self, nbytes: int) -> Buffer:
        """Zero-filled memory. Raises LimitError when the device has not that much."""

    def free(self, buffer: Buffer) -> None: ...

    def upload(self, address: int, array: Array) -> None:
        """Host to device, in stream order; ``array`` is contiguous and may be reused when the call returns."""

    def download(self, array: Array, address: int) -> None:
        """Device to host, in stream order; the content is there after :meth:`synchronize`."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Device to device, in stream order; the ranges do not overlap."""

    def zero(self, address: int, nbytes: int) -> None: ...

    def largest(self, address: int, shape: tuple[int, int], dtype: str, count: int) -> tuple[Array, Array] | None:
        """The ``count`` largest of each row of a ``[B, V]`` matrix in device memory, found on the stream.

        Returns:
            float32 values ``[B, count]`` in falling order (NaN first) and their int64 columns; among equals the order is the
            device's own. ``None``: the device has no kernel for it.
        """

    def synchronize(self) -> None: ...

    def capture(self, enqueue: Callable[[], None]) -> Captured | None:
        """Records what ``enqueue`` puts on the stream, without running it; ``None``: not possible here."""

    def close(self) -> None: ...


class HostDevice:
    """Host memory; everything happens at once."""

    name = "host"
    stream = 0

    def allocate(self, nbytes: int) -> Buffer:
        memory = np.zeros(max(nbytes, 1), np.uint8)
        return Buffer(memory.ctypes.data, nbytes, memory)

    def free(self, buffer: Buffer) -> None:
        pass

    def upload(self, address: int, array: Array) -> None:
        _host(address, array.nbytes)[:] = array.reshape(-1).view(np.uint8)

    def download(self, array: Array, address: int) -> None:
        array.reshape(-1).view(np.uint8)[:] = _host(address, array.nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        _host(target, nbytes)[:] = _host(source, nbytes)

    def zero(self, address: int, nbytes: int) -> None:
        _host(address, nbytes)[:] = 0

    def largest(self, address: int, shape: tuple[int, int], dtype: str, count: int) -> None:
        return None  # the matrix is on the host already

    def synchronize(self) -> None:
        pass

    def capture(self, enqueue: Callable[[], None]) -> Captured | None:
        return None

    def close(self) -> None:
        pass


def _host(address: int, nbytes: int) -> Array:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class CudartDevice:
    """The CUDA runtime through ``cuda.bindings``.

    Args:
        runtime: the module ``cuda.bindings.runtime`` (given by tests); ``None`` imports it.

    Raises:
        DependencyError: cuda.bindings is not installed. EngineError: CUDA does not start.
    """

    name = "cuda"

    def __init__(self, runtime: Any = None) -> None:
        self._rt = importlib.import_module("cuda.bindings.runtime") if runtime is None else runtime
        self.stream = int(self._call("cudaStreamCreateWithFlags", self._rt.cudaStreamNonBlocking))
        self._stream = self._rt.cudaStream_t(self.stream)

    def _call(self, function: str, *arguments: Any) -> Any:
        status, *values = getattr(self._rt, function)(*arguments)
        if int(status) != 0:
            error = LimitError if int(status) == int(self._rt.cudaError_t.cudaErrorMemoryAllocation) else EngineError
            raise error(f"CUDA: {function} failed with {getattr(status, 'name', status)}")
        return values[0] if values else None

    def allocate(self, nbytes: int) -> Buffer:
        address = int(self._call("cudaMalloc", max(nbytes, 1)))
        self.zero(address, max(nbytes, 1))
        return Buffer(address, nbytes)

    def free(self, buffer: Buffer) -> None:
        self._call("cudaFree", buffer.address)

    def upload(self, address: int, array: Array) -> None:
        kind = self._rt.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", address, array.ctypes.data, array.nbytes, kind, self._stream)

    def download(self, array: Array, address: int) -> None:
        kind = self._rt.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", array.ctypes.data, address, array.nbytes, kind, self._stream)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        kind = self._rt.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._call("cudaMemcpyAsync", target, source, nbytes, kind, self._stream)

    def zero(self, address: int, nbytes: int) -> None:
        self._call("cudaMemsetAsync", address, 0, nbytes, self._stream)

    def largest(self, address: int, shape: tuple[int, int], dtype: str, count: int) -> None:
        return None  # the CUDA runtime brings no kernels

    def synchronize(self) -> None:
        self._call("cudaStreamSynchronize", self._stream)

    def capture(self, enqueue: Callable[[], None]) -> Captured | None:
        self.synchronize()
        self._call("cudaStreamBeginCapture", self._stream, self._rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
        try:
            enqueue()
        finally:
            graph = self._call("cudaStreamEndCapture", self._stream)
        executable = self._call("cudaGraphInstantiate", graph, 0)
        self._call("cudaGraphDestroy", graph)
        return Captured(
            lambda: self._call("cudaGraphLaunch", executable, self._stream),
            lambda: self._call("cudaGraphExecDestroy", executable),
        )

    def close(self) -> None:
        self._call("cudaStreamDestroy", self._stream)


class TorchDevice:
    """torch tensors on a torch device; ``cpu`` works as well (and is what the tests run)."""

    def __init__(self, device: str = "cuda") -> None:
        self._torch = importlib.import_module("torch")
        self._device = self._torch.device(device)
        self.name = self._device.type
        self._cuda_stream = self._torch.cuda.Stream() if self.name == "cuda" else None
        self.stream = self._cuda_stream.cuda_stream if self._cuda_stream is not None else 0
        self._buffers: dict[int, Any] = {}

    def _on_stream(self) -> Any:
        return self._torch.cuda.stream(self._cuda_stream) if self._cuda_stream is not None else contextlib.nullcontext()

    def _view(self, address: int, nbytes: int) -> Any:
        """The bytes at an address inside one of our tensors."""
        for start, tensor in self._buffers.items():
            if start <= address and address + nbytes <= start + tensor.numel():
                return tensor[address - start : address - start + nbytes]
        raise EngineError(f"{nbytes} bytes at {address:#x} are not in a buffer of this session")

    def allocate(self, nbytes: int) -> Buffer:
        try:
            with self._on_stream():
                tensor = self._torch.zeros(max(nbytes, 1), dtype=self._torch.uint8, device=self._device)
        except self._torch.OutOfMemoryError as error:
            raise LimitError(f"the device has no {nbytes:,} bytes left: {str(error).splitlines()[0]}") from error
        self._buffers[tensor.data_ptr()] = tensor
        return Buffer(tensor.data_ptr(), nbytes, tensor)

    def free(self, buffer: Buffer) -> None:
        self._buffers.pop(buffer.address, None)

    def upload(self, address: int, array: Array) -> None:
        source = self._torch.from_numpy(array.reshape(-1).view(np.uint8))
        with self._on_stream():
            self._view(address, array.nbytes).copy_(source)  # pageable memory: returns when it has been read

    def download(self, array: Array, address: int) -> None:
        target = self._torch.from_numpy(array.reshape(-1).view(np.uint8))
        with self._on_stream():
            target.copy_(self._view(address, array.nbytes))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        with self._on_stream():
            self._view(target, nbytes).copy_(self._view(source, nbytes))

    def zero(self, address: int, nbytes: int) -> None:
        with self._on_stream():
            self._view(address, nbytes).zero_()

    def largest(self, address: int, shape: tuple[int, int], dtype: str, count: int) -> tuple[Array, Array]:
        kind = getattr(self._torch, dtype)
        with self._on_stream():
            matrix = self._view(address, shape[0] * shape[1] * kind.itemsize).view(kind).view(shape)
            values, columns = matrix.topk(count, dim=-1)
            found = values.float().cpu(), columns.cpu()  # waits for the stream
        return found[0].numpy(), found[1].numpy()

    def synchronize(self) -> None:
        if self._cuda_stream is not None:
            self._cuda_stream.synchronize()

    def capture(self, enqueue: Callable[[], None]) -> Captured | None:
        if self._cuda_stream is None:
            return None
        self.synchronize()
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=self._cuda_stream, capture_error_mode="thread_local"):
            enqueue()

        def launch() -> None:
            with self._on_stream():
                graph.replay()

        return Captured(launch, graph.reset)

    def close(self) -> None:
        self._buffers.clear()


def find_device(with_kernels: bool = False) -> Device:
    """A CUDA device: through cuda.bindings when it is installed, else through torch.

    Args:
        with_kernels: one that can search the largest logits, so torch.

    Raises:
        DependencyError: neither is installed (or torch is not, and its kernels are wanted).
    """
    try:
        if not with_kernels:
            return CudartDevice()
    except ModuleNotFoundError:
        pass
    try:
        return TorchDevice("cuda")
    except ModuleNotFoundError as error:
        raise DependencyError(
            "backend 'trt' needs cuda-python or torch for device memory: pip install 'cuda-python>=13'"
        ) from error
