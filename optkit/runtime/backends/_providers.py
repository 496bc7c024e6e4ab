"""ONNX Runtime's execution providers: which one a device means, with what options, and whether it really loaded.

ONNX Runtime puts a session on the CPU when a provider's library or driver cannot be loaded, and says so only in its log. Here a
session that is not on the provider that was asked for is an error.

The TensorRT providers build engines from the graph when the session opens and run what they do not take on CUDA. They read the
standard operators of target ``onnx``; the operators of target ``ort`` (``GroupQueryAttention``, ``MatMulNBits``) they do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnxruntime

from optkit.errors import EngineError, UnsupportedError, UsageError, nearest

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
TENSORRT, TENSORRT_RTX = "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider"
# device -> provider, and those that take over what it does not run
PROVIDERS: dict[str, tuple[str, ...]] = {
    "cpu": (CPU,),
    "cuda": (CUDA, CPU),
    "tensorrt": (TENSORRT, CUDA, CPU),
    "tensorrt-rtx": (TENSORRT_RTX, CUDA, CPU),
}
STANDARD_ONLY = (TENSORRT, TENSORRT_RTX)
# y [1] = Identity(x [1]), opset 17, as protobuf: the runtime has no library that writes it
ONE_NODE = bytes.fromhex(
    "080812003a390a100a017812017922084964656e7469747912036f6e655a0f0a0178120a0a08080112040a020801620f0a0179120a0a08"
    "080112040a02080142040a001011"
)


def providers_for(device: str | None, target: str) -> tuple[str, ...]:
    """The providers of a session, first the one that is wanted.

    Args:
        device: a key of :data:`PROVIDERS`; ``None`` takes CUDA where ONNX Runtime has it, else the CPU.
        target: what the graph was exported for.

    Raises:
        UsageError: no such device.
        UnsupportedError: this ONNX Runtime has no such provider, or the provider does not read the target's operators.
    """
    available = onnxruntime.get_available_providers()
    if device is None:
        device = "cuda" if CUDA in available else "cpu"
    if device not in PROVIDERS:
        raise UsageError(f"device {device!r}: {', '.join(PROVIDERS)}{nearest(device, tuple(PROVIDERS))}")
    wanted = PROVIDERS[device]
    if wanted[0] in STANDARD_ONLY and target == "ort":
        raise UnsupportedError(
            f"device {device!r}: {wanted[0]} reads standard operators, and this graph was made for target ort; "
            "export it with --target onnx, or use device cuda"
        )
    if wanted[0] not in available:
        raise UnsupportedError(
            f"device {device!r}: the installed ONNX Runtime has {', '.join(available)} and no {wanted[0]}; pip install "
            "'optkit[gpu]' on a machine with an NVIDIA driver"
        )
    return tuple(name for name in wanted if name in available)


def with_options(providers: tuple[str, ...], options: Mapping[str, Any] | None) -> list[str | tuple[str, dict[str, str]]]:
    """The argument ``providers`` of a session: ``options`` go to the first one, as the strings ONNX Runtime takes.

    Raises:
        UsageError: options for the CPU, which has none.
    """
    first, *rest = providers
    if not options:
        return list(providers)
    if first == CPU:
        raise UsageError(f"provider_options {', '.join(options)}: the CPU provider has none; name a device")
    texts = {name: str(int(value)) if isinstance(value, bool) else str(value) for name, value in options.items()}
    return [(first, texts), *rest]


def first_of(providers: list[str | tuple[str, dict[str, str]]]) -> str:
    """The name of the provider that is wanted."""
    return providers[0] if isinstance(providers[0], str) else providers[0][0]


def loads(provider: str) -> bool:
    """Can ONNX Runtime load this provider's libraries and find its device? Found by opening a graph of one node on it."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    try:
        engine = onnxruntime.InferenceSession(ONE_NODE, settings, providers=[provider])
    except Exception:  # the library's exceptions share no base class
        return False
    return provider in engine.get_providers()


def check_loaded(engine: onnxruntime.InferenceSession, wanted: str, where: str) -> None:
    """Raises where the session is not on the provider that was asked for.

    Raises:
        EngineError: ONNX Runtime fell back to another provider.
    """
    used = engine.get_providers()
    if wanted not in used:
        raise EngineError(
            f"{where}: ONNX Runtime could not load {wanted} and fell back to {', '.join(used)}: its libraries (CUDA, cuDNN, "
            "TensorRT) or the driver are missing or too old; `optkit doctor` names what is there"
        )
