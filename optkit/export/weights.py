"""Weights that are not in memory: tensors with a shape and a reader.

Tracing needs shapes only, so the exporter works on a skeleton whose weights are *hollow*: ordinary CPU tensors of the right
shape, dtype and strides whose memory is reserved and never touched (the operating system gives no page before the first
access). A hollow tensor's address identifies it wherever torch carries it, so each initializer of the translated graph finds
the reader that fills it when the file is written. For the eager probes the weights of one decoder layer at a time are read,
used and dropped by forward hooks. Peak memory is then the largest layer, or the largest tensor while writing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Reader = Callable[[], Tensor]


@dataclass
class Hollow:
    """One hollow tensor: the object the model holds, its empty data, and what reads the real data; ``derived`` from another,
    or of the checkpoint."""

    tensor: Tensor
    data: Tensor
    read: Reader
    name: str
    derived: bool = False


class Weights:
    """The hollow tensors of one model."""

    def __init__(self) -> None:
        self._by_address: dict[int, Hollow] = {}
        self.consumed: set[str] = set()  # names of what was read into the graph, by an initializer or as a value

    def add(self, tensor: Tensor, read: Reader, name: str) -> Tensor:
        """Makes ``tensor`` (an empty one of its own) stand for what ``read`` returns."""
        self._by_address[tensor.data_ptr()] = Hollow(tensor, tensor.data, read, name)
        return tensor

    def derive(self, base: Tensor, change: Callable[[Tensor], Tensor], name: str) -> Tensor:
        """``change(base)``; when ``base`` is hollow so is the result, and ``change`` is applied to what is read."""
        hollow = self.find(base)
        if hollow is None:
            return change(base.detach())
        shape = change(torch.empty(base.shape, dtype=base.dtype, device="meta"))
        empty = torch.empty(shape.shape, dtype=shape.dtype)
        self.consumed.add(hollow.name)
        made = self.add(empty, lambda: change(hollow.read()).contiguous(), name)
        self._by_address[made.data_ptr()].derived = True
        return made

    def find(self, tensor: Tensor) -> Hollow | None:
        """The hollow tensor that ``tensor`` is, or a whole view of."""
        if tensor.is_meta or tensor.numel() == 0:
            return None
        return self._by_address.get(tensor.data_ptr())

    def value(self, tensor: Tensor) -> Tensor:
        """The real tensor."""
        hollow = self.find(tensor)
        if hollow is None:
            return tensor.detach()
        self.consumed.add(hollow.name)
        return hollow.read()

    def names(self) -> list[str]:
        """Of every hollow tensor."""
        return [hollow.name for hollow in self._by_address.values()]

    def nbytes(self) -> int:
        """Of the checkpoint's tensors, each once, in the types they have here."""
        return sum(h.data.nbytes for h in self._by_address.values() if not h.derived)

    @contextlib.contextmanager
    def loaded(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """The real data behind these tensors for the block."""
        found = {id(h): h for t in tensors if (h := self.find(t)) is not None}
        self._load(found.values())
        try:
            yield
        finally:
            self._drop(found.values())

    @staticmethod
    def _load(hollows: Iterable[Hollow]) -> None:
        for hollow in hollows:
            hollow.tensor.data = hollow.read()

    @staticmethod
    def _drop(hollows: Iterable[Hollow]) -> None:
        for hollow in hollows:
            hollow.tensor.data = hollow.data

    @contextlib.contextmanager
    def streamed(self, model: nn.Module) -> Iterator[None]:
        """In the block the model computes: each decoder layer, and each module outside of them, holds its weights while
        it runs."""
        handles: list[Any] = []
        for module, tensors in units(model):
            found = list({id(h): h for t in tensors if (h := self.find(t)) is not None}.values())
            if found:
                handles.append(module.register_forward_pre_hook(lambda *_, f=found: self._load(f)))
                handles.append(module.register_forward_hook(lambda *_, f=found: self._drop(f), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def own_tensors(module: nn.Module, recurse: bool) -> list[Tensor]:
    return [*module.parameters(recurse=recurse), *module.buffers(recurse=recurse)]


def units(model: nn.Module) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """Modules that run at a time, with their tensors: the members of the outermost module lists whole, all others one by
    one."""

    def walk(module: nn.Module) -> Iterator[tuple[nn.Module, list[Tensor]]]:
        if own := own_tensors(module, recurse=False):
            yield module, own
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                yield from ((member, own_tensors(member, recurse=True)) for member in child)
            else:
                yield from walk(child)

    yield from walk(model)


def hollow_model(skeleton: nn.Module, reader: Callable[[str], Reader]) -> Weights:
    """Gives every meta tensor of ``skeleton`` hollow data; ``reader(name)`` returns what reads the tensor of that name."""
    weights = Weights()
    done: dict[int, Tensor] = {}
    named = [*skeleton.named_parameters(remove_duplicate=False), *skeleton.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if not tensor.is_meta:
            continue
        owner, _, leaf = name.rpartition(".")
        module = skeleton.get_submodule(owner)
        if id(tensor) not in done:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            made = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
            done[id(tensor)] = weights.add(made, reader(name), name)
        if isinstance(tensor, nn.Parameter):
            module._parameters[leaf] = done[id(tensor)]  # type: ignore[assignment]
        else:
            module._buffers[leaf] = done[id(tensor)]
    return weights
