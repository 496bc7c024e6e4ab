"""What the machine's NVIDIA driver offers, asked without loading an inference engine.

Creating a standard TensorRT ``Runtime`` or ``Builder`` on a machine without a driver returned a null wrapper, and the
next call on it ended the process. So the driver is asked first, through ``libcuda``
itself: ``cuInit`` returns an error code where there is no driver or no device, and allocates nothing where there is.
Only the standard library is used, so that the command line can ask too.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")
_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{MAJOR,MINOR}


@dataclass(frozen=True)
class Device:
    """One GPU.

    Attributes:
        name: as the driver calls it.
        capability: CUDA compute capability, ``"8.6"``.
        memory_bytes: total device memory.
    """

    name: str
    capability: str
    memory_bytes: int


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver: the CUDA version it supports (``"13.0"``) and its devices in CUDA order."""

    cuda_version: str
    devices: tuple[Device, ...]


def find_driver() -> Driver | None:
    """The machine's driver, or ``None`` when there is no driver or it has no usable device. See :func:`why_no_driver`."""
    found = _ask()
    return found if isinstance(found, Driver) else None


def why_no_driver() -> str:
    """One clause that says why :func:`find_driver` returned ``None``; empty when it did not."""
    found = _ask()
    return found if isinstance(found, str) else ""


def _load() -> ctypes.CDLL | None:
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _ask() -> Driver | str:
    library = _load()
    if library is None:
        return "no NVIDIA driver is installed (libcuda is not found)"
    status = library.cuInit(0)
    if status != 0:
        return f"the NVIDIA driver does not start (cuInit returned {status}: no GPU visible, or a version mismatch)"
    version, count = ctypes.c_int(), ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) or library.cuDeviceGetCount(ctypes.byref(count)):
        return "the NVIDIA driver does not answer"
    if count.value == 0:
        return "the NVIDIA driver sees no GPU (check CUDA_VISIBLE_DEVICES)"
    devices = tuple(_device(library, index) for index in range(count.value))
    return Driver(f"{version.value // 1000}.{version.value % 1000 // 10}", devices)


def _device(library: ctypes.CDLL, index: int) -> Device:
    handle, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    library.cuDeviceGet(ctypes.byref(handle), index)
    library.cuDeviceGetName(name, 256, handle)
    library.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_MAJOR, handle)
    library.cuDeviceGetAttribute(ctypes.byref(minor), _COMPUTE_MINOR, handle)
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
    return Device(name.value.decode(errors="replace"), f"{major.value}.{minor.value}", memory.value)
