"""Which modules get which scheme; decided, and refused if it cannot be, before any weight is read.

The linears get the recipe's scheme, except those that ``ignore`` names and those with fewer than :data:`SMALL` outputs (gates
and the like: nothing is saved there and much is lost). lm_head and embedding have policies of their own. If the checkpoint ties
them into one tensor, ``tied`` says what becomes of it: ``share`` quantizes the one tensor, ``untie`` makes two of it, each by
its own policy, ``keep`` leaves it in floating point. Nothing is decided by accident: two different policies for one shared
tensor is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from optkit.checkpoint.model import Checkpoint, linears, lm_modules
from optkit.errors import UsageError
from optkit.recipe import QuantizeRecipe
from optkit.scheme import QuantScheme, check_group_sizes, matches

SMALL = 8


@dataclass(frozen=True)
class Plan:
    """What is quantized.

    Attributes:
        shapes: module -> ``(out_features, in_features)`` of every linear, lm_head and the embedding.
        schemes: module -> scheme of what is quantized, in model order; a shared tensor is listed as the embedding.
        embedding, lm_head: their module names.
        tied: ``share``, ``untie`` or ``keep`` for a tied checkpoint, ``separate`` for one that is not tied.
        floating: linears, lm_head and embedding that stay in floating point.
    """

    shapes: dict[str, tuple[int, int]]
    schemes: dict[str, QuantScheme]
    embedding: str
    lm_head: str
    tied: str
    floating: tuple[str, ...]

    @property
    def ties(self) -> bool:
        """Embedding and lm_head are one tensor in the result."""
        return self.tied in ("share", "keep")

    def covers(self, parameter: str) -> bool:
        """Is ``parameter`` (``<module>.weight``) quantized? A shared tensor answers under both names."""
        module, _, leaf = parameter.rpartition(".")
        return leaf == "weight" and self.module(module) in self.schemes

    def module(self, module: str) -> str:
        """The name ``module`` is listed under: the embedding's for an lm_head tied to it."""
        return self.embedding if self.ties and module == self.lm_head else module


def make_plan(checkpoint: Checkpoint, recipe: QuantizeRecipe) -> Plan:
    """The plan for a checkpoint.

    Raises:
        UsageError: a group size does not divide (names every layer and the sizes that do), policies that contradict each
            other, or nothing left to quantize.
    """
    model: Any = checkpoint.skeleton()
    embedding, head = lm_modules(model)
    shapes = linears(model)
    vocabulary, width = model.get_submodule(embedding).weight.shape
    head_shape = tuple(model.get_submodule(head).weight.shape)
    tied = recipe.tied if checkpoint.spec.tied_embeddings else "separate"
    schemes = {
        name: recipe.weights() for name, shape in shapes.items() if shape[0] >= SMALL and not matches(name, recipe.ignore)
    }
    schemes = {**_embedding_schemes(recipe, embedding, head, tied), **schemes}
    ignored = [name for name in (embedding, head) if matches(name, recipe.ignore)]
    schemes = {name: scheme for name, scheme in schemes.items() if name not in ignored}
    if tied == "share" and ignored:
        schemes.pop(embedding, None)
    shapes = {**shapes, embedding: (vocabulary, width), head: (head_shape[0], head_shape[1])}
    if not schemes:
        raise UsageError("nothing is left to quantize: ignore, lm_head and embedding keep every layer in floating point")
    check_group_sizes(shapes, schemes)
    _check_combination(shapes, schemes)
    shared = embedding in schemes and tied == "share"
    floating = tuple(name for name in shapes if name not in schemes and not (shared and name == head))
    return Plan(shapes, schemes, embedding, head, "keep" if tied == "share" and not shared else tied, floating)


def _embedding_schemes(recipe: QuantizeRecipe, embedding: str, head: str, tied: str) -> dict[str, QuantScheme]:
    """Schemes of embedding and head. An embedding has no activations: of w8a8 it takes the weights' part, and so does what is
    one tensor with it."""
    part = recipe.part(recipe.lm_head)
    if part is not None and not part.dynamic_activations:  # the head is not calibrated, so it has no static scale either
        part = _weights_only(part)
    parts = {embedding: _weights_only(recipe.part(recipe.embedding)), head: part}
    if tied == "keep":
        return {}
    if tied == "share":
        if parts[embedding] != _weights_only(parts[head]):
            raise UsageError(
                f"tied: share makes embedding and lm_head one tensor, and lm_head ({recipe.lm_head}) and embedding "
                f"({recipe.embedding}) ask for different ones: set both alike, or tied: untie"
            )
        del parts[head]
    return {name: scheme for name, scheme in parts.items() if scheme is not None}


def _weights_only(scheme: QuantScheme | None) -> QuantScheme | None:
    return None if scheme is None else replace(scheme, activation_bits=16, dynamic_activations=True)


def _check_combination(shapes: dict[str, tuple[int, int]], schemes: dict[str, QuantScheme]) -> None:
    """Refuses what has no place in the stored format (docs/quantized-checkpoint.md)."""
    if any(s.activation_bits == 8 for s in schemes.values()) and not all(s.symmetric for s in schemes.values()):
        raise UsageError(
            "8-bit activations (w8a8) and asymmetric weights cannot be stored in one checkpoint: use symmetric: true"
        )
    odd = [name for name, scheme in schemes.items() if scheme.num_bits == 4 and shapes[name][1] % 2]
    if odd:
        raise UsageError(
            f"4-bit weights need an even number of inputs, which {', '.join(odd)} have not: ignore them or use int8"
        )
