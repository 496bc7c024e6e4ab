"""A model's decoder blocks, one in memory at a time, and what their linears see.

*Blocks by structure.* A block is an element of a module list that holds quantized linears; which lists those are and in what
order the elements run is observed, not read from names. The model is built with its parameters on the ``meta`` device and only
what lies outside the blocks is loaded. Blocks are then replaced by stand-ins that note how they are called (masks, position
tables and the like can differ from block to block and from batch to batch) and pass the hidden states on; the noted calls are
replayed later on one real block after the other. So the memory is that of one block and the activations, whatever the depth.

*Activations* are kept between blocks as float32 ``[N, S, D]`` in memory up to a budget and in a file beyond it
(:class:`Activations`).

*Precision.* Matrix products of forward passes run in bfloat16 where the CPU has instructions for it (about 4x float32 here; the
statistics made from them differ by far less than two calibration texts do); norms, sums and everything in ``H`` stay float32,
because a bfloat16 ``H`` is not positive definite.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from optkit.checkpoint.model import Checkpoint
from optkit.checkpoint.modules import set_tensor
from optkit.errors import UnsupportedError, storage_errors

BATCH_TOKENS = 4096
MEMORY_BUDGET = 512 << 20  # bytes of activations kept in memory by one Activations object

_HIDDEN = object()


def fast_matmul() -> bool:
    """Does this CPU multiply bfloat16 matrices in hardware?"""
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    cpu = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return probe is not None and cpu is not None and bool(probe()) and bool(cpu())


def precision() -> contextlib.AbstractContextManager[Any]:
    """The context forward passes over calibration text run in."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast_matmul())


class Activations:
    """Hidden states ``[N, S, D]`` float32 by batch, in memory or in a file.

    Args:
        shape: ``(N, S, D)``.
        path: the file to use beyond ``budget`` bytes; made, and removed by :meth:`close`.
    """

    def __init__(self, shape: tuple[int, int, int], path: Path, budget: int = MEMORY_BUDGET) -> None:
        self.shape, self._path = shape, path
        self._memory: Tensor | None = None
        if 4 * shape[0] * shape[1] * shape[2] <= budget:
            self._memory = torch.empty(shape)
        else:
            with storage_errors(path), open(path, "wb") as handle:
                handle.truncate(4 * shape[0] * shape[1] * shape[2])

    @property
    def spilled(self) -> bool:
        return self._memory is None

    def read(self, rows: slice) -> Tensor:
        """``[n, S, D]``, a copy."""
        if self._memory is not None:
            return self._memory[rows].clone()
        count = (rows.stop - rows.start) * self.shape[1] * self.shape[2]
        values = np.fromfile(self._path, np.float32, count, offset=4 * rows.start * self.shape[1] * self.shape[2])
        return torch.from_numpy(values).view(-1, *self.shape[1:])

    def write(self, rows: slice, values: Tensor) -> None:
        if self._memory is not None:
            self._memory[rows] = values
            return
        with storage_errors(self._path), open(self._path, "r+b") as handle:
            handle.seek(4 * rows.start * self.shape[1] * self.shape[2])
            values.float().contiguous().numpy().tofile(handle)

    def close(self) -> None:
        self._memory = None
        self._path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Call:
    """How a block is called: its arguments, with a mark where the hidden states go."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Call, Tensor]:
        """A call and the hidden states in it (the first floating-point ``[B, S, D]`` tensor)."""
        for at, value in enumerate(args):
            if _is_hidden(value):
                return cls((*args[:at], _HIDDEN, *args[at + 1 :]), dict(kwargs)), value
        for key, value in kwargs.items():
            if _is_hidden(value):
                return cls(args, {**kwargs, key: _HIDDEN}), value
        raise UnsupportedError(
            "a decoder block gets no hidden states [B, S, D]: calibrated methods cannot follow it; use method rtn"
        )

    def run(self, block: Callable[..., Any], hidden: Tensor) -> Tensor:
        """The output hidden states of a block, or of a function that stands for it."""
        args = (hidden if value is _HIDDEN else value for value in self.args)
        kwargs = {key: hidden if value is _HIDDEN else value for key, value in self.kwargs.items()}
        output = block(*args, **kwargs)
        return output[0] if isinstance(output, tuple | list) else output


def _is_hidden(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()


class _Stop(Exception):
    """Ends a forward pass that has shown what was wanted."""


def block_names(model: nn.Module, linears: Collection[str]) -> list[str]:
    """Names of the outermost module-list elements that hold one of ``linears``, in the order of the list."""
    names: dict[str, None] = {}
    for linear in linears:
        parts = linear.split(".")
        for end in range(1, len(parts)):
            parent = model.get_submodule(".".join(parts[:end]))
            if isinstance(parent, nn.ModuleList):
                names.setdefault(".".join(parts[: end + 1]))
                break
    lists = {name.rpartition(".")[0] for name in names}
    if len(lists) > 1:
        raise UnsupportedError(
            f"decoder blocks lie in {len(lists)} module lists ({', '.join(sorted(lists))}): "
            "calibrated methods follow one; use method rtn"
        )
    return sorted(names, key=lambda name: int(name.rpartition(".")[2]))


class BlockModel:
    """A checkpoint's model whose blocks are loaded one by one.

    Attributes:
        model: on the meta device, except what :meth:`load_outside` and :meth:`loaded` put there.
        names: of the blocks, in running order.
        linears: for each block the quantized linears in it, by their names inside the block.
        tokens: ``[N, S]``.
        rows: which of them make each batch.
        first_hidden: ``[N, S, D]``, what enters the first block; after :meth:`note_calls`.
    """

    first_hidden: Activations

    def __init__(
        self, checkpoint: Checkpoint, linears: Collection[str], tokens: Tensor, directory: Path, budget: int = MEMORY_BUDGET
    ) -> None:
        self._checkpoint, self.directory, self.budget = checkpoint, directory, budget
        self.model: Any = checkpoint.skeleton(torch.float32)
        _use_sdpa(self.model)
        self.names = block_names(self.model, linears)
        if not self.names:
            raise UnsupportedError(
                "no decoder blocks with quantized linears were found: calibrated methods need some; use method rtn"
            )
        self.linears = [[name[len(block) + 1 :] for name in linears if name.startswith(f"{block}.")] for block in self.names]
        size = max(1, BATCH_TOKENS // tokens.shape[1])
        self.rows = [slice(at, min(at + size, len(tokens))) for at in range(0, len(tokens), size)]
        self.tokens = tokens
        self._tuple = False
        self._calls: list[list[Call]] = []

    # ---- weights -----------------------------------------------------------------------------------------------------------

    def _outside(self) -> list[str]:
        prefixes = tuple(f"{name}." for name in self.names)
        named = self.model.named_parameters(remove_duplicate=False)
        return [name for name, _ in named if not name.startswith(prefixes)]

    def load_outside(self) -> None:
        """Loads what is not in a block: embeddings, last norm, lm_head."""
        done: dict[int, Tensor] = {}
        for name in self._outside():
            old = self.model.get_parameter(name)
            if old.is_meta or id(old) in done:
                new = done.get(id(old))
                done[id(old)] = set_tensor(self.model, name, self._checkpoint.tensor_for(name)() if new is None else new)

    def free_outside(self) -> None:
        shared: dict[int, nn.Parameter] = {}
        for name in self._outside():
            old = self.model.get_parameter(name)
            set_tensor(self.model, name, shared.setdefault(id(old), _meta_like(old)))

    @contextlib.contextmanager
    def loaded(self, index: int) -> Iterator[nn.Module]:
        """Block ``index`` with its float32 weights; they are dropped at the end."""
        block = self.model.get_submodule(self.names[index])
        names = [name for name, parameter in block.named_parameters() if parameter.is_meta]
        for name in names:
            set_tensor(block, name, self._checkpoint.tensor_for(f"{self.names[index]}.{name}")())
        try:
            yield block
        finally:
            for name in names:
                set_tensor(block, name, _meta_like(block.get_parameter(name)))

    # ---- calls -------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _standing_in(self, stand_in: Callable[[int, Tensor, Call], Tensor]) -> Iterator[None]:
        """Blocks replaced by ``stand_in(index, hidden, call) -> hidden``."""

        def make(index: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                call, hidden = Call.of(args, kwargs)
                output = stand_in(index, hidden, call)
                return (output, None) if self._tuple else output

            return forward

        blocks = [self.model.get_submodule(name) for name in self.names]
        for index, block in enumerate(blocks):
            block.forward = make(index)
        try:
            yield
        finally:
            for block in blocks:
                del block.forward

    def _forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits

    def note_calls(self) -> None:
        """Runs the model on every batch with stand-ins; needs what is outside the blocks."""
        self._tuple = self._returns_tuple()
        self._calls = []
        for rows in self.rows:
            calls, hidden = self._note_batch(self.tokens[rows])
            if not self._calls:
                shape = (len(self.tokens), hidden.shape[1], hidden.shape[2])
                self.first_hidden = Activations(shape, self.directory / "first-hidden.f32", self.budget)
            self._calls.append(calls)
            self.first_hidden.write(rows, hidden.float())

    def _note_batch(self, tokens: Tensor) -> tuple[list[Call], Tensor]:
        calls: dict[int, Call] = {}
        first: list[Tensor] = []

        def note(index: int, hidden: Tensor, call: Call) -> Tensor:
            calls[index] = call
            first.append(hidden)
            if len(calls) == len(self.names):
                raise _Stop
            return hidden

        with self._standing_in(note), contextlib.suppress(_Stop):
            self._forward(tokens)
        if list(calls) != list(range(len(self.names))):
            raise UnsupportedError(
                f"the blocks do not run one after the other ({len(calls)} of {len(self.names)} were called): use method rtn"
            )
        return list(calls.values()), first[0]

    def _returns_tuple(self) -> bool:
        """Does a block return a tuple? Found by running the first on two tokens."""
        found: list[Any] = []

        def first(index: int, hidden: Tensor, call: Call) -> Tensor:
            found.append((hidden, call))
            raise _Stop

        with self._standing_in(first), contextlib.suppress(_Stop):
            self._forward(self.tokens[:1, :2])
        hidden, call = found[0]
        with self.loaded(0) as block:
            args = (hidden if value is _HIDDEN else value for value in call.args)
            kwargs = {key: hidden if value is _HIDDEN else value for key, value in call.kwargs.items()}
            return isinstance(block(*args, **kwargs), tuple)

    def run(self, index: int, block: Callable[..., Any], batch: int, hidden: Tensor) -> Tensor:
        """Block ``index`` on the hidden states of batch number ``batch``: ``[b, S, D]`` -> ``[b, S, D]``."""
        return self._calls[batch][index].run(block, hidden)

    def call(self, index: int, batch: int = 0) -> Call:
        return self._calls[batch][index]

    def note_probe(self, tokens: int) -> None:
        """Notes how blocks are called on the first ``tokens`` of the first text; for :meth:`probe`."""
        self._probe_calls, self._probe_hidden = self._note_batch(self.tokens[:1, :tokens])

    def probe(self, index: int, block: nn.Module) -> Callable[[], Tensor]:
        """Runs block ``index`` in float32 on a few tokens, always the same."""
        call, hidden = self._probe_calls[index], self._probe_hidden.float()
        return lambda: call.run(block, hidden)

    def head(self, rows: slice, hidden: Tensor) -> Tensor:
        """Logits ``[b, S, V]`` from the hidden states ``[b, S, D]`` that leave the last block for the texts ``rows``.

        Logits are large (a vocabulary for each token): ask for one text at a time.
        """
        last = len(self.names) - 1

        def replay(index: int, given: Tensor, call: Call) -> Tensor:
            return hidden if index == last else given

        with self._standing_in(replay):
            return self._forward(self.tokens[rows])


def _use_sdpa(model: Any) -> None:
    """Fused attention where the architecture has it; it only changes speed and rounding."""
    with contextlib.suppress(ValueError, AttributeError, ImportError):
        model.set_attn_implementation("sdpa")


def _meta_like(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


@contextlib.contextmanager
def watching(block: nn.Module, linears: Collection[str], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Calls ``see(name, x [T, I])`` whenever one of the block's ``linears`` gets an input."""

    def hook(name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else next(iter(kwargs.values()))
            see(name, value.reshape(-1, value.shape[-1]))

        return before

    handles = [block.get_submodule(name).register_forward_pre_hook(hook(name), with_kwargs=True) for name in linears]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def block_of(name: str, blocks: Collection[str]) -> str | None:
    """The block that the module ``name`` is in."""
    return next((block for block in blocks if name.startswith(f"{block}.")), None)


def natural(name: str) -> list[int | str]:
    """A sort key that puts ``h.10`` after ``h.9``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
