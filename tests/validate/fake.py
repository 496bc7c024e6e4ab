"""A session without an engine: the logits of a position are a fixed random function of its tokens so far."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np


class FakeSession:
    """Logits depend on the whole past, so a wrong past shows; ``noise`` and ``flaw`` make a worse model of it.

    Args:
        vocab: size of the vocabulary.
        seed: of the weights; two sessions with one seed are the same model.
        noise: standard deviation added to every logit (its own seed).
        flaw: called with ``(logits [B, V], step)``; may change them.
    """

    backend = "fake"
    has_tokenizer = False

    def __init__(self, vocab=32, seed=0, noise=0.0, flaw=None, noise_seed=1):
        rng = np.random.default_rng(seed)
        self.spec = SimpleNamespace(vocab_size=vocab)
        self._embed = rng.normal(size=(vocab, 16))
        self._head = rng.normal(size=(16, vocab)) * 2
        self._noise, self._noise_rng, self._flaw = noise, np.random.default_rng(noise_seed), flaw
        self.rows: list[list[int]] = []
        self.calls: list[tuple[str, object]] = []

    def reset(self):
        self.rows = []
        self.calls.append(("reset", None))

    def prefill(self, input_ids, lengths, logits="last"):
        self.calls.append(("prefill", np.asarray(lengths).tolist()))
        self.rows = [list(map(int, row[:n])) for row, n in zip(input_ids, lengths, strict=True)]
        if logits == "all":
            return np.stack([[self._logits(row[: i + 1]) for i in range(len(row))] for row in self.rows]).astype(np.float32)
        return self._answer()

    def decode(self, token_ids):
        self.calls.append(("decode", np.asarray(token_ids).tolist()))
        for row, token in zip(self.rows, token_ids, strict=True):
            row.append(int(token))
        return self._answer()

    def _answer(self):
        logits = np.stack([self._logits(row) for row in self.rows])
        if self._noise:
            logits = logits + self._noise_rng.normal(size=logits.shape) * self._noise
        if self._flaw is not None:
            logits = self._flaw(logits, len(self.rows[0]))
        return logits.astype(np.float32)

    def _logits(self, row):
        weights = 0.7 ** np.arange(len(row))[::-1]  # recent tokens count more
        state = (self._embed[row] * weights[:, None]).sum(0)
        return np.tanh(state) @ self._head
