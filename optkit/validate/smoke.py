"""The smoke test an artifact carries: a prompt and the greedy tokens it gave where it was made.

A deployment that answers garbage (a broken kernel for this CPU, a truncated copy, another engine version) is found in a
second, without the reference and without any text. The manifest's facts hold ``smoke``:
``{"prompt": [ids], "tokens": [ids], "margins": [nats]}``; ``margins`` (optional) are how much the chosen token led at each
step, so that a near tie on another CPU is told from a fault.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from optkit.errors import ParityError, UnsupportedError
from optkit.manifest import read_manifest
from optkit.validate import parity, sides

NEAR_TIE_NATS = 0.05


def smoke(artifact: str | Path, backend: str | None = None, threads: int | None = None) -> dict[str, Any]:
    """Runs the artifact's smoke prompt.

    Returns:
        ``{"artifact", "passed", "steps", "tokens", "expected"}``.

    Raises:
        ArtifactError: not an artifact.
        UnsupportedError: it carries no smoke prompt.
        ParityError: other tokens came out, and the difference is not a near tie.
    """
    facts = read_manifest(artifact, kind="artifact").facts.get("smoke")
    if not facts:
        raise UnsupportedError(f"{artifact}: carries no smoke prompt; export it again, or validate with --reference")
    prompt = np.asarray(facts["prompt"], dtype=np.int64)
    expected = list(facts["tokens"])
    with sides.opened(artifact, backend, threads) as session:
        found = parity.generate_greedy(session, prompt, len(expected))
    differs = next((i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), None)
    margins = facts.get("margins")
    if differs is not None and not (margins and margins[differs] <= NEAR_TIE_NATS):
        raise ParityError(
            f"{artifact}: smoke token {differs + 1} is {found[differs]}, and was {expected[differs]} where it was made: "
            "the copy or the engine on this machine is faulty; compare with --reference to see by how much"
        )
    return {
        "artifact": str(artifact),
        "passed": True,
        "steps": len(expected),
        "near_tie_at": differs,
        "tokens": found,
        "expected": expected,
    }
