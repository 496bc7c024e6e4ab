"""optkit: quantize, export, verify and run decoder-only language models on ONNX Runtime and TensorRT.

``quantize``, ``export``, ``open_session``, ``validate`` and ``build`` are the five stages; each reads and writes a directory
with a manifest (``optkit.json``). This module imports nothing heavy: a name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_STAGES = ("quantize", "export", "validate", "build")  # packages that can be called, see _callable.py
_FUNCTIONS = {
    "open_session": ("optkit.runtime.session", "open_session"),
    "load_recipe": ("optkit.recipe", "load_recipe"),
}
__all__ = ["__version__", "build", "export", "load_recipe", "open_session", "quantize", "validate"]

if TYPE_CHECKING:
    from optkit.build.run import build as build
    from optkit.export.run import export as export
    from optkit.quantize.run import quantize as quantize
    from optkit.recipe import load_recipe as load_recipe
    from optkit.runtime.session import open_session as open_session
    from optkit.validate.run import validate as validate


def __getattr__(name: str) -> Any:
    import importlib

    if name in _STAGES:
        return importlib.import_module("optkit." + name)
    if name in _FUNCTIONS:
        module, attribute = _FUNCTIONS[name]
        return getattr(importlib.import_module(module), attribute)
    raise AttributeError(f"module 'optkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
