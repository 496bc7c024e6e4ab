"""Packages that can be called.

``optkit.quantize`` is both the package of that name and the stage function users call. Python allows it: a module's
``__class__`` may be a subclass of ``ModuleType`` (Python data model, "Customizing module attribute access"). The function
stays in ``<package>.run`` and is imported at the first call, so the package itself stays hollow.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


def make_callable(package: str, function: str) -> None:
    """Makes the module ``package`` call ``package.run.function``."""

    class CallablePackage(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(package + ".run"), function)(*args, **kwargs)

    sys.modules[package].__class__ = CallablePackage
