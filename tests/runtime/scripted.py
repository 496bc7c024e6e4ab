"""A session without a model: its logits are a function of the tokens so far, so a test knows every answer beforehand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from optkit.manifest import ModelSpec
from optkit.runtime.base import Session
from optkit.runtime.limits import SessionLimits

PAD, BOS, EOS, END = 0, 1, 2, 3
SPECIAL = {"<pad>": PAD, "<s>": BOS, "</s>": EOS, "<|end|>": END}
FIRST_BYTE = len(SPECIAL)
VOCAB = FIRST_BYTE + 256


def spec(**changes: object) -> ModelSpec:
    sizes = {"num_layers": 1, "hidden_size": 8, "vocab_size": VOCAB, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    ids = {"bos_token_id": BOS, "pad_token_id": PAD, "eos_token_ids": (EOS, END)}
    return ModelSpec(**{"model_type": "scripted", "max_seq_len": 512, **sizes, **ids, **changes})  # type: ignore[arg-type]


def byte_tokens(text: str) -> list[int]:
    """One token per UTF-8 byte, so that every other character of a test ends inside a token."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def write_tokenizer(directory: Path, *, bos: bool = False, template: str | None = None, **config: object) -> Path:
    """A byte-level tokenizer whose vocabulary is the 256 bytes after the special tokens."""
    names = _byte_names()
    core = Tokenizer(models.BPE(vocab={**SPECIAL, **{names[b]: FIRST_BYTE + b for b in range(256)}}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    core.add_special_tokens(list(SPECIAL))
    directory.mkdir(parents=True, exist_ok=True)
    core.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def _byte_names() -> list[str]:
    """The printable character that byte-level tokenizers use for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names, extra = {}, 0
    for byte in range(256):
        if byte in printable:
            names[byte] = chr(byte)
        else:
            names[byte] = chr(256 + extra)
            extra += 1
    return [names[byte] for byte in range(256)]


class ScriptedSession(Session):
    """Logits come from ``answer(tokens of the row) -> [V]``; every run is written down.

    Attributes:
        runs: (name, tokens per row) of each engine run.
    """

    backend = "scripted"

    def __init__(
        self,
        directory: Path,
        answer: Callable[[list[int]], np.ndarray],
        limits: SessionLimits | None = None,
        **changes: object,
    ) -> None:
        model = spec(**changes)
        super().__init__(model, directory, model.max_seq_len, limits or SessionLimits())
        self.answer = answer
        self.runs: list[tuple[str, list[int]]] = []

    def cache_bytes(self, batch: int, length: int) -> int:
        return 64 * batch * length

    def _allocate(self, batch: int, capacity: int) -> None: ...

    def _resize(self, capacity: int) -> None: ...

    def _truncate(self, lengths: np.ndarray) -> None: ...

    def _select(self, rows: np.ndarray) -> None: ...

    def _extend(self, ids: np.ndarray, counts: np.ndarray, every: bool) -> np.ndarray:
        self.runs.append(("extend", counts.tolist()))
        result = np.zeros((*ids.shape, self.spec.vocab_size), np.float32)
        for b, count in enumerate(counts.tolist()):
            for n in range(count):
                result[b, n] = self.answer(self._rows[b] + ids[b, : n + 1].tolist())
        return result if every else result[np.arange(len(ids)), np.maximum(counts - 1, 0)]

    def _step(self, tokens: np.ndarray) -> np.ndarray:
        self.runs.append(("step", [1] * len(tokens)))
        return np.stack([self.answer([*row, token]) for row, token in zip(self._rows, tokens.tolist(), strict=True)])


def one_hot(token: int, vocab: int = VOCAB) -> np.ndarray:
    logits = np.zeros(vocab, np.float32)
    logits[token] = 10.0
    return logits


def saying(answers: dict[tuple[int, ...], Sequence[int]], vocab: int = VOCAB) -> Callable[[list[int]], np.ndarray]:
    """A model that continues each prompt with its answer, and then with EOS."""

    def answer(tokens: list[int]) -> np.ndarray:
        for prompt, reply in answers.items():
            if tuple(tokens[: len(prompt)]) == prompt:
                said = len(tokens) - len(prompt)
                return one_hot(reply[said] if said < len(reply) else EOS, vocab)
        return one_hot(EOS, vocab)

    return answer


def random_model(vocab: int = VOCAB, seed: int = 0) -> Callable[[list[int]], np.ndarray]:
    """Logits that depend on the last three tokens only, the same on every call."""

    def answer(tokens: list[int]) -> np.ndarray:
        return np.random.default_rng([seed, *tokens[-3:]]).standard_normal(vocab).astype(np.float32) * 2

    return answer
