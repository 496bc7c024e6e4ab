"""From the command line's options to what the stages take: recipe sections, limits, the prompt, sampling arguments."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optkit.errors import InputError, RecipeError, UsageError
from optkit.recipe import Limits, QuantizeRecipe, Recipe, parse_section


def merge(cls: type, base: Any, options: Mapping[str, Any], where: str) -> Any:
    """The section ``base`` (or the defaults) with the options that were given; checked as a recipe would be."""
    given = {key: value for key, value in options.items() if value is not None and value != ()}
    if base is None:
        return parse_section(cls, given, where)
    parse_section(cls, given, where)  # types and names
    return dataclasses.replace(base, **given)


def quantize_section(loaded: Recipe | None, options: Mapping[str, Any]) -> QuantizeRecipe:
    """The ``quantize`` section from a recipe (if any) and the options of the command."""
    base = (loaded.quantize if loaded else None) or QuantizeRecipe()
    if loaded is not None and loaded.quantize is None:
        raise RecipeError("the recipe has no quantize section: it describes an unquantized artifact; export its model instead")
    names = {"calibration": "source", "calibration_samples": "samples", "calibration_length": "length", "seed": "seed"}
    calibration = {name: options[key] for key, name in names.items() if options.get(key) is not None}
    rest = {key: value for key, value in options.items() if key not in names}
    if rest.get("group_size") is not None:
        text = str(rest["group_size"])
        if not (text.isdigit() or text == "channel"):
            raise UsageError(f"--group-size {text}: a number (32, 64, 128) or channel")
        rest["group_size"] = int(text) if text.isdigit() else text
    merged = merge(QuantizeRecipe, base, rest, "quantize")
    section: QuantizeRecipe = dataclasses.replace(merged, calibration=dataclasses.replace(merged.calibration, **calibration))
    return section


def limits(base: Limits, given: Sequence[str]) -> Limits:
    values: dict[str, float] = {}
    for text in given:
        name, separator, value = text.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError:
            raise UsageError(f"--limit {text!r}: NAME=VALUE with a number, for instance kl_mean=0.05") from None
        if not separator:
            raise UsageError(f"--limit {text!r}: NAME=VALUE")
    limits: Limits = merge(Limits, base, values, "limit")
    return limits


def prompt_text(option: str | None, argument: str | None, file: Path | None) -> str:
    given = [value for value in (option, argument, file) if value is not None]
    if len(given) > 1:
        raise UsageError("give one prompt: --prompt TEXT, --prompt-file FILE, or - for standard input")
    if file is not None and str(file) != "-":
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--prompt-file {file}: {getattr(error, 'strerror', None) or error}") from error
    text = option if option is not None else argument
    if file is not None or text == "-" or (text is None and not sys.stdin.isatty()):
        text = sys.stdin.read()
    if not text:
        raise UsageError("there is no prompt: use --prompt TEXT, --prompt-file FILE, or - to read standard input")
    return text


def sampling(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``generate()``: only what was given, so that the loop's defaults have one home."""
    filters = ("temperature", "top_k", "top_p", "min_p")
    names = ("max_new_tokens", "do_sample", *filters, "repetition_penalty", "seed", "stop")
    given = {name: options.pop(name) for name in names}
    given = {name: value for name, value in given.items() if value is not None and value != ()}
    drawn = [name for name in filters if name in given]
    if given.get("do_sample") is False and drawn:
        raise UsageError(
            f"--greedy takes the most likely token: leave out {', '.join('--' + name.replace('_', '-') for name in drawn)}"
        )
    return given
