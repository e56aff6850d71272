"""Contexts: one rank's graphs and gradients of a training step.

No I/O.

A context has a number that is unique in its group: the rank that began it, in the bits from 48 on, and a counter (as in
torch.distributed.autograd). Gradients belong to a context and never go to the `grad` of a tensor.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fedring.remote.errors import CallRefused

_COUNTER_BITS = 48
MAX_CONTEXT = 2**63 - 1
MAX_OPEN = 10_000
"""How many contexts of other ranks may be open at one rank."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A call within a context, at the owner that ran it."""

    outputs: Sequence[Tensor]  # those that gradients flow back from
    inputs: Sequence[Tensor]  # leaves, whose gradients go to the caller


class Context:
    """One rank's part of a context.

    Its methods may be called from several threads.

    Attributes:
        number: The context's number.
        anchor: An empty leaf. Every remote call's outputs depend on it, so that a backward pass always reaches them.
        retain_graph: Whether the backward pass that runs keeps the graphs for another one.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.anchor = torch.empty(0, requires_grad=True, device="cpu")
        self.retain_graph = False
        self.lock = threading.Lock()
        self._ended = False
        self._owners: set[int] = set()
        self._numbers = itertools.count()
        self._records: dict[int, Record] = {}
        self._gradients: dict[Tensor, Tensor] = {}

    @property
    def size(self) -> tuple[int, int]:
        """The number of calls whose graphs it keeps, and that of gradients."""
        with self.lock:
            return len(self._records), len(self._gradients)

    def calling(self, owner: int) -> None:
        """Note that an owner is called from now on.

        The caller holds `lock` until the request is on its way.

        Raises:
            Refused: The context has ended.
        """
        if self._ended:
            raise CallRefused("the context of this call has ended", reason="context_ended")
        self._owners.add(owner)

    def keep(self, record: Record) -> int:
        """Keep a call's graph, and return the number for `backward_of`."""
        with self.lock:
            number = next(self._numbers)
            if not self._ended:
                self._records[number] = record
        return number

    def backward_of(self, number: int, gradients: Sequence[Tensor | None], *, retain_graph: bool) -> list[Any]:
        """Compute the gradients of a call's inputs.

        Args:
            number: The call's number.
            gradients: The gradients of its outputs.
            retain_graph: Whether another backward pass through the call follows.

        Returns:
            The gradients of the inputs, None where unused.

        Raises:
            Refused: There is no such call, or a gradient does not have the shape and dtype of its output.
        """
        with self.lock:
            record = self._records.get(number) if retain_graph else self._records.pop(number, None)
            self.retain_graph = retain_graph
        if record is None:
            raise CallRefused(
                "the graph of this call is not there: its context has ended, or a backward pass without "
                "retain_graph=True has used it",
                reason="no_graph",
            )
        if len(gradients) != len(record.outputs):
            raise CallRefused(
                f"{len(gradients)} gradients came for {len(record.outputs)} outputs", reason="bad_gradient"
            )
        pairs = [(out, grad) for out, grad in zip(record.outputs, gradients, strict=True) if grad is not None]
        # The gradients come from a peer: autograd would broadcast some wrong shapes without an error.
        for output, gradient in pairs:
            if (gradient.shape, gradient.dtype) != (output.shape, output.dtype):
                raise CallRefused(
                    f"a gradient of {gradient.dtype} {list(gradient.shape)} came for an output of {output.dtype} "
                    f"{list(output.shape)}",
                    reason="bad_gradient",
                )
        found = self.backward(
            [output for output, _ in pairs], [gradient.to(output.device) for output, gradient in pairs], record.inputs
        )
        return [found.get(one) for one in record.inputs]

    def backward(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None, inputs: Sequence[Tensor] = ()
    ) -> dict[Tensor, Tensor]:
        """Compute the gradients of all leaves.

        Those of parameters are added to the context.

        Args:
            outputs: Where to begin.
            gradients: The gradient of each output; None = all are scalars, and their gradients are 1.
            inputs: Leaves whose gradients are returned instead.

        Returns:
            The gradients of the inputs that the outputs depend on.
        """
        wanted = list(leaves(outputs))
        if not wanted:
            return {}
        # Not `backward`, which would add the gradients of all contexts in the `grad` of the same parameters.
        found = torch.autograd.grad(list(outputs), wanted, gradients, retain_graph=self.retain_graph, allow_unused=True)
        apart = {*inputs, self.anchor}
        returned: dict[Tensor, Tensor] = {}
        with self.lock:
            for leaf, gradient in zip(wanted, found, strict=True):
                if gradient is None or leaf is self.anchor:
                    continue
                into = returned if leaf in apart else self._gradients
                into[leaf] = into[leaf] + gradient if leaf in into else gradient
        return returned

    def gradients(self) -> dict[Tensor, Tensor]:
        """Return the gradients of this rank's parameters so far."""
        with self.lock:
            return dict(self._gradients)

    def end(self) -> set[int]:
        """Free everything. Return the owners that were called and must free theirs."""
        with self.lock:
            self._ended = True
            self._records.clear()
            self._gradients.clear()
            owners, self._owners = self._owners, set()
        return owners


class Contexts:
    """The contexts of one rank, by number.

    Args:
        rank: This rank.
        size: The number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._counter = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Context] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self) -> Context:
        """Begin a context at this rank."""
        context = Context((self._rank << _COUNTER_BITS) | next(self._counter))
        with self._lock:
            self._open[context.number] = context
        return context

    def enter(self, number: int) -> Context:
        """Return the context of an incoming call.

        It is made if another rank has begun it.

        Raises:
            Refused: This rank has begun it, and it has ended; or too many are open; or no rank can have begun it.
        """
        with self._lock:
            context = self._open.get(number)
            if context is None:
                if begun_by(number) == self._rank:
                    raise CallRefused("the context of this call has ended", reason="context_ended")
                if begun_by(number) >= self._size:  # nobody would ever end it
                    raise CallRefused(f"no rank can have begun the context {number}", reason="no_context")
                if len(self._open) >= MAX_OPEN:
                    raise CallRefused(f"{MAX_OPEN} contexts are open here: end some of them", reason="overloaded")
                context = self._open[number] = Context(number)
        return context

    def get(self, number: int) -> Context:
        """Return a context.

        Raises:
            Refused: There is none with this number.
        """
        with self._lock:
            context = self._open.get(number)
        if context is None:
            raise CallRefused("no call was made here within this context, or it has ended", reason="no_context")
        return context

    def end(self, number: int) -> set[int]:
        """End a context, if it is there.

        Returns the owners that were called from here within it.
        """
        with self._lock:
            context = self._open.pop(number, None)
        return context.end() if context is not None else set()

    def end_all(self, of: Callable[[int], bool] = lambda rank: True) -> None:
        """End the contexts that were begun by ranks for which `of` holds."""
        with self._lock:
            numbers = [number for number in self._open if of(begun_by(number))]
        for number in numbers:
            self.end(number)


def begun_by(number: int) -> int:
    """Return the rank that has begun the context with this number."""
    return number >> _COUNTER_BITS


def leaves(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves with `requires_grad` behind the outputs, each once."""
    # A loop, as the graphs of deep models are deeper than Python's stack.
    seen: set[Any] = set()
    waiting: list[Any] = []
    for output in outputs:
        if output.grad_fn is not None:
            waiting.append(output.grad_fn)
        elif output.requires_grad and output not in seen:
            seen.add(output)
            yield output
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            if node.variable not in seen:
                seen.add(node.variable)
                yield node.variable
        else:
            waiting += [following for following, _ in node.next_functions if following is not None]


@contextmanager
def keeping_versions() -> Iterator[None]:
    """Let a backward pass use the values of its forward pass.

    It does so even if a step has replaced them since.

    A step gives a parameter new memory. Autograd would find the new memory through the parameter, but finds the old one
    through a tensor that is detached from it. What is changed in place is noticed, as without this.
    """

    def pack(tensor: Tensor) -> tuple[Tensor, int]:
        detached = tensor.detach()
        return detached, detached._version

    def unpack(packed: tuple[Tensor, int]) -> Tensor:
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError(
                f"a tensor of shape {list(tensor.shape)} that the backward pass needs was changed in place after the "
                "forward pass"
            )
        return tensor

    with saved_tensors_hooks(pack, unpack):
        yield


class Caller(Protocol):
    """The part of the agent that a scope uses."""

    def begin(self) -> Context:
        """Begin a context."""
        ...


class Scope:
    """The context of a thread's calls.

    Without one, a context is begun by the first call.
    """

    def __init__(self, caller: Caller | None = None, context: Context | None = None) -> None:
        self.caller, self.context = caller, context
        self._lock = threading.Lock()

    def context_at(self, caller: Caller) -> Context:
        """Return the context for a call.

        Raises:
            Refused: The context was begun in another group.
        """
        with self._lock:
            if self.context is None:
                self.caller, self.context = caller, caller.begin()
            if self.caller is not caller:
                raise CallRefused("a context belongs to one group: begin another one", reason="other_group")
            return self.context


current: ContextVar[Scope | None] = ContextVar("fedring.remote.current", default=None)
"""The scope of this thread's calls."""


@contextmanager
def inside(scope: Scope) -> Iterator[None]:
    """Put this thread's calls in the block into a scope."""
    token = current.set(scope)
    try:
        yield
    finally:
        current.reset(token)
