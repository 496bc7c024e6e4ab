"""Which linears read the same input, what makes that input, and how a scale moves between the two. Observed, not read from
names.

Smoothing (AWQ, SmoothQuant) multiplies the columns of a linear's weight by ``s [I]`` and divides its input by ``s``; the
division is folded into whatever makes the input. Two things can make it, and a probe tells which: change a candidate's
parameters, run the block on a few tokens and look at the input of the linears.

*A norm.* A parameter vector ``p [I]`` (with a bias ``b``, if its module has one) such that the input comes out divided by
``s`` when it is edited: ``p / s`` for a plain norm, ``(1 + p) / s - 1`` for norms that multiply by ``1 + p`` (dividing ``p``
there would not scale the output by ``1/s``; tools that assume it break those models).

*Another linear* whose output channel ``c`` only reaches the input channels ``i`` with ``channel[i] = c``, and does so by a
factor: the up-projection of a gated MLP, or the values of attention, where several heads can share one (grouped queries). Each
row is multiplied by a number of its own and the ratios of the inputs tell which row reaches which channel. Rows that reach it
in another way (the gate; queries and keys in a fused projection) change the input by something that is not one factor per
channel; the range of rows that do is found by bisection from either end.

Nothing is believed that was not measured: :func:`fold` is followed by a run of the whole block, and its output must be what it
was to :data:`TOLERANCE`. That proof also rejects folds that would change another reader of the same norm (a residual, a
router).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from optkit.quantize.capture import watching

TOLERANCE = 1e-4
RATIO_TOLERANCE = 2e-3


@dataclass
class Group:
    """Linears of a block that read the same tensor.

    Attributes:
        linears: their names inside the block, in calling order.
        producer: where a scale of their input folds to; ``None`` when nothing was found.
    """

    linears: tuple[str, ...]
    producer: NormProducer | LinearProducer | None = None


@dataclass(frozen=True)
class NormProducer:
    """The parameter vector ``name`` (and ``bias``), whose output is proportional to ``offset + parameter``."""

    name: str
    bias: str | None
    offset: float

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.name,) if self.bias is None else (self.name, self.bias)

    def reduce(self, s: Tensor) -> Tensor:
        """The scale per input channel that can be folded, from the one that is wanted: any."""
        return s


@dataclass(frozen=True)
class LinearProducer:
    """The linear ``name``; input channel ``i`` is proportional to its output row ``rows[i]``."""

    name: str
    rows: Tensor = field(compare=False)  # [I] int64
    outputs: int = 0

    @property
    def parameters(self) -> tuple[str, ...]:
        return (f"{self.name}.weight",)

    def reduce(self, s: Tensor) -> Tensor:
        """``s [I]`` made equal (geometric mean) over the channels that one row feeds."""
        total = torch.zeros(self.outputs, dtype=s.dtype).index_add_(0, self.rows, s.log())
        count = torch.zeros(self.outputs, dtype=s.dtype).index_add_(0, self.rows, torch.ones_like(s))
        return (total / count.clamp(min=1))[self.rows].exp()


def find_groups(block: nn.Module, linears: Sequence[str], run: Callable[[], Tensor]) -> list[Group]:
    """The groups of a block, with their producers.

    Args:
        block: with its weights loaded (float32).
        linears: names inside the block of the linears that will be quantized.
        run: runs the block on a few tokens; returns its output.
    """
    groups = _shared_inputs(block, linears, run)
    order = [name for group in groups for name in group.linears]
    for group in groups:
        earlier = order[: order.index(group.linears[0])]
        group.producer = _norm_producer(block, group, run) or _linear_producer(block, group, earlier, run)
    return groups


def _shared_inputs(block: nn.Module, linears: Sequence[str], run: Callable[[], Tensor]) -> list[Group]:
    seen: dict[tuple[Any, ...], list[str]] = {}
    alive: list[Tensor] = []

    def see(name: str, x: Tensor) -> None:
        alive.append(x)  # a freed tensor's address could be used again
        names = seen.setdefault((x.data_ptr(), tuple(x.shape)), [])
        if name not in names:
            names.append(name)

    with watching(block, linears, see):
        run()
    return [Group(tuple(names)) for names in seen.values()]


def group_input(block: nn.Module, linear: str, run: Callable[[], Tensor]) -> Tensor:
    """``[T, I]`` input of a linear in a run of the block."""
    found: list[Tensor] = []
    with watching(block, [linear], lambda _, x: found.append(x.detach().clone())):
        run()
    return found[0]


@contextmanager
def edited(block: nn.Module, changes: dict[str, Tensor]) -> Iterator[None]:
    """The block with other values in some parameters, for a while."""
    kept = {name: block.get_parameter(name).data for name in changes}
    for name, value in changes.items():
        block.get_parameter(name).data = value
    try:
        yield
    finally:
        for name, value in kept.items():
            block.get_parameter(name).data = value


def _random_scale(size: int, seed: int = 0) -> Tensor:
    """Numbers in [0.7, 1.4], all different."""
    generator = torch.Generator().manual_seed(seed)
    return 0.7 + 0.7 * (torch.randperm(size, generator=generator) + 0.5) / size


def _norm_producer(block: nn.Module, group: Group, run: Callable[[], Tensor]) -> NormProducer | None:
    before = group_input(block, group.linears[0], run)
    s = _random_scale(before.shape[-1])
    for name, parameter in block.named_parameters():
        if parameter.dim() != 1 or len(parameter) != len(s) or name.endswith("bias"):
            continue
        owner = block.get_submodule(name.rpartition(".")[0])
        bias = getattr(owner, "bias", None)
        bias_name = f"{name.rpartition('.')[0]}.bias" if isinstance(bias, nn.Parameter) and len(bias) == len(s) else None
        for offset in (0.0, 1.0):
            producer = NormProducer(name, bias_name, offset)
            with edited(block, fold_producer(block, producer, s)):
                after = group_input(block, group.linears[0], run)
            if _close(after * s, before):
                return producer
    return None


def _close(candidate: Tensor, reference: Tensor) -> bool:
    return bool((candidate - reference).abs().max() <= TOLERANCE * reference.abs().max())


def _linear_producer(
    block: nn.Module, group: Group, earlier: Sequence[str], run: Callable[[], Tensor]
) -> LinearProducer | None:
    before = group_input(block, group.linears[0], run)
    for name in reversed(earlier):
        outputs = linear_weight(block, name).shape[0]
        for part in _factor_ranges(block, group, name, before, run, outputs):
            rows = _reached(block, group, name, before, run, *part)
            if rows is not None and bool((rows >= 0).all()):
                return LinearProducer(name, rows, outputs)
    return None


def _factor_ranges(
    block: nn.Module, group: Group, name: str, before: Tensor, run: Callable[[], Tensor], outputs: int
) -> Iterator[tuple[int, int]]:
    """Ranges of rows that act on the input by factors only: all of them, the longest tail, the longest head."""

    def good(start: int, stop: int) -> bool:
        return _reached(block, group, name, before, run, start, stop) is not None

    if good(0, outputs):
        yield 0, outputs
        return
    yield _bisect(lambda start: good(start, outputs), outputs), outputs
    yield 0, outputs - _bisect(lambda cut: good(0, outputs - cut), outputs)


def _bisect(good: Callable[[int], bool], high: int) -> int:
    """The least number in ``[0, high]`` from which on ``good`` holds; it holds for the empty range at ``high``."""
    low = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle + 1, high)
    return low


def _reached(
    block: nn.Module, group: Group, name: str, before: Tensor, run: Callable[[], Tensor], start: int, stop: int
) -> Tensor | None:
    """For each input channel the row in ``start:stop`` it is proportional to, or -1; ``None`` if some row acts otherwise."""
    factor = torch.ones(linear_weight(block, name).shape[0])
    if stop == start:
        return torch.full((before.shape[-1],), -1, dtype=torch.int64)
    factor[start:stop] = 1.0 + _random_scale(stop - start, seed=1)  # in [1.7, 2.4], never near 1
    with edited(block, scale_rows(block, name, factor)):
        after = group_input(block, group.linears[0], run)
    ratio = (after * before).sum(0) / (before * before).sum(0).clamp(min=1e-30)  # [I], least squares over tokens
    scale = before.abs().amax(0).clamp(min=1e-30)
    if bool(((after - ratio * before).abs().amax(0) > RATIO_TOLERANCE * scale).any()):
        return None
    sorted_factor, order = factor[start:stop].sort()
    nearest = _nearest(sorted_factor, ratio)
    hit = (sorted_factor[nearest] - ratio).abs() < 0.3 / max(stop - start, 1) * 0.7
    untouched = (ratio - 1).abs() < RATIO_TOLERANCE
    if not bool((hit | untouched).all()):
        return None
    return torch.where(untouched, torch.full_like(nearest, -1), order[nearest] + start)


def _nearest(ascending: Tensor, values: Tensor) -> Tensor:
    right = torch.searchsorted(ascending, values).clamp(max=len(ascending) - 1)
    left = (right - 1).clamp(min=0)
    return torch.where((ascending[left] - values).abs() <= (ascending[right] - values).abs(), left, right)


# ---- weights and folds --------------------------------------------------------------------------------------------------


def is_transposed(module: nn.Module) -> bool:
    """Is the weight stored ``[I, O]`` (as GPT-2's layers do)?"""
    return not isinstance(module, nn.Linear)


def linear_weight(block: nn.Module, name: str) -> Tensor:
    """``[O, I]`` weight of a linear, a view."""
    module: Any = block.get_submodule(name)
    weight: Tensor = module.weight.data
    return weight.T if is_transposed(module) else weight


def stored_weight(block: nn.Module, name: str, weight: Tensor) -> dict[str, Tensor]:
    """The parameter value that makes ``[O, I]`` ``weight`` the weight of a linear."""
    module = block.get_submodule(name)
    return {f"{name}.weight": weight.T.contiguous() if is_transposed(module) else weight.contiguous()}


def scale_rows(block: nn.Module, name: str, factor: Tensor) -> dict[str, Tensor]:
    """A linear whose output channels are multiplied by ``factor [O]``."""
    changes = stored_weight(block, name, linear_weight(block, name) * factor.unsqueeze(1))
    bias: Any = getattr(block.get_submodule(name), "bias", None)
    if bias is not None:
        changes[f"{name}.bias"] = bias.data * factor
    return changes


def fold_producer(block: nn.Module, producer: NormProducer | LinearProducer, s: Tensor) -> dict[str, Tensor]:
    """Parameter values with which the producer's output is divided by ``s [I]``."""
    if isinstance(producer, LinearProducer):
        factor = torch.ones(producer.outputs)
        factor[producer.rows] = 1 / s
        return scale_rows(block, producer.name, factor)
    value = block.get_parameter(producer.name).data
    changes = {producer.name: (value + producer.offset) / s - producer.offset}
    if producer.bias is not None:
        changes[producer.bias] = block.get_parameter(producer.bias).data / s
    return changes


def fold(block: nn.Module, group: Group, s: Tensor) -> dict[str, Tensor]:
    """All parameter values of a group smoothed by ``s [I]``: columns times ``s``, producer divided by it."""
    assert group.producer is not None
    changes = fold_producer(block, group.producer, s)
    for name in group.linears:
        changes |= stored_weight(block, name, linear_weight(block, name) * s)
    return changes


def apply(block: nn.Module, changes: dict[str, Tensor]) -> None:
    for name, value in changes.items():
        block.get_parameter(name).data = value


def output_change(before: Tensor, after: Tensor) -> float:
    """Largest difference relative to the largest value."""
    return float((after - before).abs().max() / before.abs().max().clamp(min=1e-30))


def proven(block: nn.Module, groups: Iterable[Group], run: Callable[[], Tensor]) -> None:
    """Takes the producer from every group whose fold changes the block's output (by a trial with a random scale)."""
    before = run()
    for group in groups:
        if group.producer is None:
            continue
        s = group.producer.reduce(_random_scale(linear_weight(block, group.linears[0]).shape[1], seed=2))
        with edited(block, fold(block, group, s)):
            if output_change(before, run()) > TOLERANCE:
                group.producer = None
