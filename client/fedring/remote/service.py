"""Answers requests at their owner.

No I/O: the agent brings requests and sends the answers.
"""

import itertools
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from fedring.remote import requests
from fedring.remote.contexts import (
    MAX_CONTEXT,
    Caller,
    Context,
    Contexts,
    Record,
    Scope,
    begun_by,
    inside,
    keeping_versions,
)
from fedring.remote.errors import BadMessage, CallRefused
from fedring.remote.holdings import Holdings
from fedring.remote.messages import Message, outgoing
from fedring.remote.requests import MAX_NAME, REASON, RemoteFailure, Reply, Request
from fedring.remote.stepping import OwnedOptimizer, StepLock
from fedring.remote.values import flatten, nowhere, unflatten
from fedring.train.names.offered import Offered

MAX_CALLS = 64
"""How many functions, methods and modules one rank may have running here."""

MAX_ELSEWHERE = 1000
"""How many references to what other ranks hold the arguments of one call may have."""

_MAX_RUNNING = 4 * MAX_CALLS  # requests of one rank, of any kind; for what ends a step, twice as many
_MAX_MESSAGE, _MAX_TRACEBACK = 4000, 16000  # characters

Job = Callable[[], Message]


class Service:
    """Answers the requests of all ranks at one rank.

    Args:
        rank: This rank.
        size: The number of ranks.
        modules: The served modules, by name.
        offered: The functions and classes that may be called.
        caller: The agent through which functions that run here call other ranks.
        claim: Returns a reference of this rank's own to what another one holds, given that rank, and the number that a
            caller has told, or a name. It waits for that rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        modules: Mapping[str, nn.Module],
        offered: Offered,
        caller: Caller,
        *,
        claim: Callable[[int, int | str], Any] = nowhere,
    ) -> None:
        self._rank, self._size, self._claim = rank, size, claim
        self.contexts = Contexts(rank, size)
        self.holdings = Holdings(modules, offered)
        self._caller = caller
        self._steps = StepLock()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._running: dict[int, tuple[int, bool, list[Tensor]]] = {}  # rank, whether it may wait, memory in use
        self._stepping = threading.Lock()  # while a phase of a step runs
        self._prepared: tuple[int, OwnedOptimizer] | None = None  # the step under way, and its context

    def accept(self, rank: int, message: Message) -> tuple[Job | None, int | None]:
        """Accept a request, in the order of the sending rank.

        It does not wait.

        Returns:
            The job that answers the request, if there is an answer, and the context that the request ends, if any.

        Raises:
            FedringError: The request is not valid, or refused.
        """
        request = requests.parse(message.content)
        self.holdings.release(rank, request.released)
        if isinstance(request, requests.Release):
            return None, None
        if isinstance(request, requests.End):
            return None, request.context
        context = None
        if isinstance(request, requests.Call | requests.Fetch) and request.context is not None:
            context = self.contexts.enter(request.context)
        room = 2 * _MAX_RUNNING if isinstance(request, requests.Commit | requests.Abort) else _MAX_RUNNING
        number = self._begin(rank, is_call=isinstance(request, requests.Call), room=room)

        def job() -> Message:
            try:
                return self._answer(rank, request, message, context)
            except BaseException as error:  # noqa: BLE001  # whatever the user's code raises, the caller must know
                return failed(error)
            finally:
                with self._lock:
                    del self._running[number]

        return job, None

    def is_stepping(self, context: int) -> bool:
        """Return whether the context is in the middle of a step here."""
        return self._steps.holder == context

    def left(self, ranks: Sequence[int]) -> None:
        """Free the values of ranks that have left.

        Nobody else would free them any more.
        """
        self.holdings.release_all(ranks.__contains__)
        self.contexts.end_all(ranks.__contains__)
        if (holder := self._steps.holder) is not None and begun_by(holder) in ranks:
            self.undo(holder)

    def fail(self, error: Exception) -> None:
        """Free everything, and raise the error in waiting requests."""
        self._steps.fail(error)
        if (holder := self._steps.holder) is not None:
            self.undo(holder)
        self.holdings.release_all()
        self.contexts.end_all()

    def _begin(self, rank: int, *, is_call: bool, room: int) -> int:
        with self._lock:
            mine = [running for running in self._running.values() if running[0] == rank]
            calls = sum(1 for _, of_user, _ in mine if of_user)
            if len(mine) >= room or (is_call and calls >= MAX_CALLS):
                raise CallRefused(
                    f"{calls} calls and {len(mine) - calls} other requests of rank {rank} run here, of at most "
                    f"{MAX_CALLS} calls and {room} requests: wait for some of them",
                    reason="overloaded",
                )
            number = next(self._numbers)
            self._running[number] = (rank, is_call, [])
        return number

    def _answer(self, rank: int, request: Request, message: Message, context: Context | None) -> Message:
        match request:
            case requests.Call() | requests.Fetch():
                return self._run(rank, request, message, context)
            case requests.Claim():
                return answer(self.holdings.claim(rank, request.reference))
            case requests.Parameters():
                return answer(list(self.holdings.parameters(rank, request.target)))
            case requests.Backward():
                return self._backward(request, message)
            case requests.FetchGradients():
                found = self.contexts.get(request.context).gradients()
                named = self.holdings.parameters(rank, request.target).items()
                return answer({name: found[parameter] for name, parameter in named if parameter in found})
            case requests.Create():
                return self._create(rank, request, message)
            case requests.Lock():
                return answer(self._acquire(request.context, wait=True))
            case requests.Prepare():
                return answer(self._prepare(rank, request))
            case requests.Commit():
                self._commit(request.context)
                return answer(None)
            case requests.Abort():
                self.undo(request.context)
                return answer(None)
            case _:
                raise BadMessage(f"{request.verb} has no answer")

    def _run(self, rank: int, request: Any, message: Message, context: Context | None) -> Message:
        """Run a call, or fetch a value.

        Within a context, the graph is kept.
        """

        def held(key: int | str) -> Any:
            return self.holdings.get(rank, key)

        if context is None:
            return self._result(rank, request, self._value(request, message.tensors, held), None, ())
        given = [
            tensor.requires_grad_() if grad else tensor
            for tensor, grad in zip(message.tensors, message.grads, strict=True)
        ]
        inputs = [tensor for tensor, grad in zip(given, message.grads, strict=True) if grad]
        with inside(Scope(self._caller, context)), keeping_versions():
            return self._result(rank, request, self._value(request, given, held), context, inputs)

    def _value(self, request: Any, tensors: Sequence[Tensor], held: Callable[[int | str], Any]) -> Any:
        if isinstance(request, requests.Fetch):
            return held(request.target)
        arguments = unflatten(request.arguments, tensors, held, partial(self._elsewhere, itertools.count()))
        if not (
            isinstance(arguments, list)
            and len(arguments) == 2
            and isinstance(arguments[0], list)
            and isinstance(arguments[1], dict)
        ):
            raise BadMessage("the arguments of a call are not a list and a dict")
        if request.function:
            function = self.holdings.function(request.function)
        else:
            function = self.holdings.method(held(request.target), request.method)
        return function(*arguments[0], **arguments[1])

    def _elsewhere(self, count: Iterator[int], rank: int, key: int | str) -> Any:
        """Return a reference to a third rank's value.

        It is this rank's own before the call begins, and so the caller may drop its own when the call has ended.
        """
        if not 0 <= rank < self._size or rank == self._rank:
            raise BadMessage(f"a reference to what rank {rank} holds came to rank {self._rank} of {self._size}")
        if not (0 <= key <= MAX_CONTEXT if isinstance(key, int) else len(key) <= MAX_NAME):
            raise BadMessage(f"a reference to what rank {rank} holds has neither a number nor a name")
        if next(count) >= MAX_ELSEWHERE:  # each of them costs a request to the other rank
            raise BadMessage(f"the arguments of a call have more than {MAX_ELSEWHERE} references to other ranks")
        return self._claim(rank, key)

    def _result(
        self, rank: int, request: Any, value: Any, context: Context | None, inputs: Sequence[Tensor]
    ) -> Message:
        if isinstance(request, requests.Call) and request.stay:
            if context is not None and any(tensor.grad_fn is not None for tensor in _tensors_in(value)):
                raise CallRefused(
                    "the result was computed from tensors that require gradients, and a reference would lose them: "
                    "use call(), or make the reference outside of a context",
                    reason="history",
                )
            return answer(self.holdings.keep(rank, value))
        tensors: list[Tensor] = []
        tree = flatten(value, tensors, owner=-1)
        if context is None:
            return outgoing(Reply(value=tree).model_dump(exclude_defaults=True), tensors)
        grads = [tensor.requires_grad for tensor in tensors]
        # A caller that computes no gradients of the result will not ask for them, so keep no graph for it.
        record = None
        if any(grads):
            record = context.keep(Record([one for one in tensors if one.requires_grad], inputs))
        content = Reply(value=tree, record=record).model_dump(exclude_defaults=True)
        return outgoing(content, tensors, grads)

    def _backward(self, request: requests.Backward, message: Message) -> Message:
        gradients = unflatten(request.gradients, message.tensors, _none_held)
        if not isinstance(gradients, list) or not all(one is None or isinstance(one, Tensor) for one in gradients):
            raise BadMessage("the gradients are not a list of tensors")
        context = self.contexts.get(request.context)
        with inside(Scope(self._caller, context)):
            return answer(context.backward_of(request.record, gradients, retain_graph=request.retain_graph))

    def _create(self, rank: int, request: requests.Create, message: Message) -> Message:
        options = unflatten(request.options, message.tensors, _none_held)
        if not isinstance(options, dict):
            raise BadMessage("the options of an optimizer are not a dict")
        parameters: dict[str, Tensor] = {}
        for place in request.parameters:
            known = self.holdings.parameters(rank, place.target)
            if place.name not in known:
                raise CallRefused(f"{place.target} has no parameter {place.name[:80]!r}", reason="unknown_parameter")
            parameters[f"{place.name or 'the tensor'} of {place.target}"] = known[place.name]
        return answer(self.holdings.keep(rank, OwnedOptimizer(request.kind, parameters, options)))

    def _acquire(self, context: int, *, wait: bool) -> bool:
        """Let a context step, as `StepLock.acquire` does.

        A context that has ended by then is refused.
        """
        acquired = self._steps.acquire(context, wait=wait)
        try:
            self.contexts.get(context)
        except CallRefused:
            self._steps.release(context)
            raise
        return acquired

    def _prepare(self, rank: int, request: requests.Prepare) -> bool:
        context = self.contexts.get(request.context)
        optimizer = self.holdings.get(rank, request.optimizer)
        if not isinstance(optimizer, OwnedOptimizer):
            raise CallRefused(f"reference {request.optimizer} is not an optimizer", reason="unknown_optimizer")
        if not self._acquire(request.context, wait=False):
            return False
        with self._stepping:
            self._steps.check(request.context)  # The context may have ended meanwhile, which has let others step.
            if self._prepared is not None:
                raise CallRefused("another step of this context is under way", reason="prepared")
            self._prepared = request.context, optimizer
            optimizer.prepare(context.gradients())
        return True

    def _commit(self, context: int) -> None:
        self._steps.check(context)
        with self._stepping:
            if self._prepared is None or self._prepared[0] != context:
                raise CallRefused("there is no step to commit", reason="not_prepared")
            old = self._prepared[1].commit()
            self._prepared = None
        with self._lock:
            for _, _, in_use in self._running.values():
                in_use += old  # torch may be reading it for a call that runs
        self._steps.release(context)

    def undo(self, context: int) -> None:
        """Undo the step of a context, if any, and let others step."""
        with self._stepping:
            if self._prepared is not None and self._prepared[0] == context:
                self._prepared[1].abort()
                self._prepared = None
            self._steps.release(context)  # before another thread can prepare a step of this context


def answer(value: Any) -> Message:
    """Return the message that answers with a value.

    Raises:
        BadMessage: The value cannot be sent.
    """
    tensors: list[Tensor] = []
    tree = flatten(value, tensors, owner=-1)
    return outgoing(Reply(value=tree).model_dump(exclude_defaults=True), tensors)


def failed(error: BaseException) -> Message:
    """Return the message that tells a caller of an error."""
    try:
        failure = _described(error)
    except Exception as broken:  # noqa: BLE001  # the class of a user's error; its caller waits for an answer
        kind = _printable(type(broken).__name__)
        failure = RemoteFailure(type=_type_name(error), message=f"the error cannot be described: that raises {kind}")
    return Message(Reply(error=failure).model_dump(exclude_defaults=True))


def _described(error: BaseException) -> RemoteFailure:
    reason = getattr(error, "reason", "")
    return RemoteFailure(
        type=_type_name(error),
        message=_printable(str(error))[:_MAX_MESSAGE],
        reason=reason if isinstance(reason, str) and re.fullmatch(REASON, reason) else "",
        traceback=_printable("".join(traceback.format_exception(error)))[-_MAX_TRACEBACK:],
    )


def _type_name(error: BaseException) -> str:
    return _printable(type(error).__name__)[:200]


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors_in(item)]
    return [value] if isinstance(value, Tensor) else []


def _printable(text: str) -> str:
    return text.encode(errors="replace").decode()


def _none_held(key: int | str) -> Any:
    raise BadMessage(f"a reference, {key!r}, stands where none may be")
