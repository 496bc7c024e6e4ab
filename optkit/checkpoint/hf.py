"""transformers, kept quiet, and its own rules for which stored tensors make which parameter."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, build_glob_alternation, rename_source_key


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers' progress bars, reports and warnings off the terminal."""
    log, bars = transformers.utils.logging, transformers.utils.logging.is_progress_bar_enabled()
    verbosity = log.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


class Rules:
    """transformers' own rules for a model: what its stored tensors are renamed to, and how they are converted."""

    def __init__(self, model: Any) -> None:
        self._model = model
        with quiet():
            found = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in found if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in found if isinstance(rule, WeightConverter)]
        self._state = model.state_dict()

    def place(self, key: str) -> tuple[str, Any, str] | None:
        """Where stored tensor ``key`` goes: the model's name (of several, the first), the converter or ``None``, and its
        pattern."""
        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(key, self._renamings, self._converters, prefix, self._state)
        if name not in self._state:
            name, pattern = rename_source_key(key, [], [], prefix, self._state)
        if name not in self._state:
            return None
        rule = next((rule for rule in self._converters if pattern in rule.source_patterns), None)
        return name, rule, pattern or ""

    def results(self, rule: Any, first: str) -> list[str]:
        """The model's names that a converter makes, when ``first`` is the first."""
        pattern = rule.target_patterns[0]
        return [first.replace(pattern, other) for other in rule.target_patterns]

    def convert(self, rule: Any, first: str, tensors: Sequence[tuple[str, str, Callable[[], Tensor]]]) -> dict[str, Any]:
        """Runs a converter on ``(key, pattern, reader)``; name -> tensor."""
        rule = copy.deepcopy(rule)
        for key, pattern, reader in tensors:
            rule.add_tensor(first, key, pattern, reader)
        with quiet():
            made: dict[str, Any] = rule.convert(first, model=self._model, config=self._model.config)
        return made

    def kept_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """``dtype``, or float32 for a parameter that the model keeps so."""
        kept = list(self._model._get_dtype_plan(dtype))
        return torch.float32 if kept and build_glob_alternation(kept)[0].search(name) else dtype
