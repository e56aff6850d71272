"""The owners of modules and values, as callers see them.

Owners are the ranks of a group. References name the values that they hold.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn

from fedring.remote import requests
from fedring.remote.agent import Agent
from fedring.remote.contexts import Context, current
from fedring.remote.errors import BadMessage, RemoteError
from fedring.remote.graphs import attach
from fedring.remote.messages import Message, outgoing
from fedring.remote.requests import Reply, Request
from fedring.remote.values import Handle, flatten, unflatten
from fedring.ring import NotSupported, RingError, RingProcessGroup
from fedring.train.names.offered import collect

Before = TypeVar("Before")
Then = TypeVar("Then")

log = logging.getLogger(__name__)


class Owner:
    """A rank that answers calls.

    It may be this rank itself: calls are the same, without a network.

    Attributes:
        rank: The rank in the group.
        name: The name in errors.
    """

    def __init__(self, agent: Agent, rank: int) -> None:
        self.agent, self.rank, self.name = agent, rank, agent.name_of(rank)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owner) and (self.agent, self.rank) == (other.agent, other.rank)

    def __hash__(self) -> int:
        return hash((self.agent, self.rank))

    def call(self, function: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function that the owner offers, and return the result.

        Args:
            function: "module:attribute".
            args: Tensors, numbers, strings, None, booleans, references, and lists, tuples and dicts of them. Of what
                this owner holds, the function gets the value itself, and of what other ranks hold a reference.
            kwargs: The same, by name.

        Raises:
            RemoteError: The function has failed, or was refused.
            BadMessage: An argument cannot be sent.
            RingError: A rank is lost.
        """
        return self.call_async(function, *args, **kwargs).result()

    def call_async(self, function: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `call`, but return a future.

        Do not change tensors among the arguments before it has ended.
        """
        return self.send_call({"function": function}, args, kwargs)

    def remote(self, function: str, /, *args: Any, **kwargs: Any) -> "Reference":
        """As `call`, but leave the result at the owner.

        Returns a reference to it at once. Whatever uses the reference waits for the result, and raises the error of the
        call if there was one.

        Raises:
            BadMessage: An argument cannot be sent.
            RingError: A rank is lost.
        """
        return self.reference(self.send_call({"function": function, "stay": True}, args, kwargs))

    def reference(self, made: Future[Any]) -> "Reference":
        """Return a reference to a value, given a future of its number."""
        return Reference(self, _then(made, self._number))

    def module(self, name: str) -> "Reference":
        """Return a reference to a module that the owner serves."""
        key: Future[int | str] = Future()
        key.set_result(name)
        return Reference(self, key)

    def send_call(self, what: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        """Send a call, and return a future of its result.

        Args:
            what: Fields of `requests.Call`.
            args: The positional arguments.
            kwargs: The keyword arguments.
        """
        tensors: list[Tensor] = []
        arguments = flatten([list(args), dict(kwargs)], tensors, owner=self.rank)
        future = self._in_graph(partial(requests.Call, arguments=arguments, **what), tensors)
        _keep(future, args, kwargs)  # the references among them
        return future

    def fetch(self, key: int | str) -> Any:
        """Return a copy of a held value.

        Within a context, gradients flow back to it.
        """
        return self._in_graph(partial(requests.Fetch, target=key), []).result()

    def ask(self, request: Request, tensors: Sequence[Tensor] = (), context: Context | None = None) -> Future[Any]:
        """Send a request outside of any graph.

        Returns a future of the answer's value.
        """
        future = self.agent.request(self.rank, outgoing(requests.content_of(request), tensors), context)
        return _then(future, lambda reply: self._value(self._answer(reply), reply.tensors))

    def _in_graph(self, request: Callable[..., Request], tensors: Sequence[Tensor]) -> Future[Any]:
        """Send a call whose results may belong to the graph.

        They do if this thread is in a context and computes gradients.
        """
        scope = current.get() if torch.is_grad_enabled() else None
        if scope is None:
            return self.ask(request(), tensors)
        context = scope.context_at(self.agent)
        inputs = [tensor for tensor in tensors if tensor.requires_grad]
        message = outgoing(
            requests.content_of(request(context=context.number)), tensors, [tensor.requires_grad for tensor in tensors]
        )
        future = self.agent.request(self.rank, message, context)
        return _then(future, lambda reply: self._attached(reply, context, inputs))

    def _attached(self, reply: Message, context: Context, inputs: Sequence[Tensor]) -> Any:
        """Return an answer's value, with its tensors in this process's graph."""
        answer = self._answer(reply)
        outputs = [tensor for tensor, grad in zip(reply.tensors, reply.grads, strict=True) if grad]
        if answer.record is None or not outputs:
            return self._value(answer, reply.tensors)
        attached = iter(attach(context, inputs, outputs, partial(self._backward, context, answer.record, inputs)))
        tensors = [next(attached) if grad else tensor for tensor, grad in zip(reply.tensors, reply.grads, strict=True)]
        return self._value(answer, tensors)

    def _backward(
        self, context: Context, record: int, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Let the owner compute the gradients of the inputs."""
        tensors: list[Tensor] = []
        tree = flatten(list(gradients), tensors, owner=self.rank)
        request = requests.Backward(
            context=context.number, record=record, retain_graph=context.retain_graph, gradients=tree
        )
        found = self.ask(request, tensors, context).result()
        if not isinstance(found, list) or len(found) != len(inputs):
            raise BadMessage(f"{self.name} did not answer with a gradient for each input")
        for one, tensor in zip(found, inputs, strict=True):
            if one is not None and not (isinstance(one, Tensor) and one.shape == tensor.shape):
                raise BadMessage(f"{self.name} answered with a gradient that does not have the shape of its input")
        return [None if one is None else one.to(tensor.device) for one, tensor in zip(found, inputs, strict=True)]

    def _number(self, key: Any) -> int | str:
        if type(key) is not int:
            raise BadMessage(f"{self.name} did not answer with the number of a reference, but with {key!r:.80}")
        return key

    def _answer(self, reply: Message) -> Reply:
        try:
            answer = Reply.model_validate(reply.content)
        except ValidationError:
            raise BadMessage(f"{self.name} sent an answer that is not valid") from None
        if answer.error is not None:
            error = RemoteError(self.name, answer.error.type, answer.error.message, reason=answer.error.reason)
            if answer.error.traceback:
                error.add_note(f"at {self.name}:\n{answer.error.traceback}")
            raise error
        return answer

    def _value(self, answer: Reply, tensors: Sequence[Tensor]) -> Any:
        return unflatten(answer.value, tensors, self._no_reference)

    def _no_reference(self, key: int | str) -> Any:
        raise BadMessage(f"{self.name} answered with a reference, {key!r}")


class Reference(Handle):
    """A name for a value that stays at its owner.

    The value is a module that the owner serves, or a result of `Owner.remote`.

    Pass it as an argument to calls at any rank: its owner uses the value, and every other rank gets a reference of its
    own. The owner drops the value of a result when all ranks have dropped their last reference, or are lost.
    """

    __slots__ = ("_key", "owner")

    def __init__(self, owner: Owner, key: Future[int | str]) -> None:
        object.__setattr__(self, "rank", owner.rank)
        object.__setattr__(self, "owner", owner)
        object.__setattr__(self, "_key", key)
        weakref.finalize(self, _forget, owner, key).atexit = False

    owner: Owner
    _key: Future[int | str]

    @property
    def key(self) -> int | str:  # pyright: ignore[reportIncompatibleVariableOverride]  # it waits
        """The number or name of the value, once the owner has it.

        Raises:
            RemoteError: The call whose result it would be has failed, or was refused.
            RingError: A rank is lost.
        """
        return self._key.result()

    def wait(self) -> "Reference":
        """Wait until the value is at its owner, and return this reference.

        Raises:
            RemoteError: The call whose result it would be has failed, or was refused.
            RingError: A rank is lost.
        """
        self._key.result()
        return self

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the module that it names; see `Owner.call`."""
        return self.call("__call__", *args, **kwargs)

    def __repr__(self) -> str:
        key = repr(self._key.result()) if self._key.done() and not self._key.exception() else "without a value"
        return f"<reference {key} at {self.owner.name}>"

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method that its class offers; see `Owner.call`."""
        return self.call_async(method, *args, **kwargs).result()

    def call_async(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `call`, but return a future; see `Owner.call_async`."""
        future = self.owner.send_call({"target": self.key, "method": method}, args, kwargs)
        _keep(future, self)
        return future

    def fetch(self) -> Any:
        """Return a copy of the value.

        Within a context, gradients flow back to it.
        """
        return self.owner.fetch(self.key)


class Owners:
    """All ranks of a group, by rank.

    Attributes:
        rank: This process's rank.
    """

    def __init__(self, agent: Agent) -> None:
        self.rank = agent.rank
        self._owners = [Owner(agent, rank) for rank in range(agent.size)]

    def __len__(self) -> int:
        return len(self._owners)

    def __getitem__(self, rank: int) -> Owner:
        return self._owners[rank]

    def __iter__(self) -> Iterator[Owner]:
        return iter(self._owners)


@contextmanager
def serve(
    modules: Mapping[str, nn.Module] | None = None,
    *,
    trusted: Sequence[str] = (),
    group: dist.ProcessGroup | None = None,
    max_message_bytes: int = 1 << 30,
    timeout: float | None = None,
) -> Iterator[Owners]:
    """Serve other ranks' calls, and call them, in a `with` block.

    All ranks of a group enter the block.

    At its end the block waits until all ranks have come to theirs. If it is left with an error, the generation ends, so
    that no other rank waits for this one.

    Args:
        modules: The modules that others may call here, by name.
        trusted: What others may call here: modules, of which they may call what is marked with `@offers("remote")`,
            and single functions, "module:function as remote".
        group: A group of the backend fedring; None = the default group.
        max_message_bytes: The most bytes that the tensors of a message may have.
        timeout: Seconds that a call may take, after which the generation ends; None = the group's timeout.

    Yields:
        The ranks of the group.

    Raises:
        ValueError: `trusted` is a string, and not a sequence of strings.
        SeamError: Something that is trusted cannot be imported.
        NotSupported: The group is of another backend.
        RingError: A rank is lost.
    """
    if isinstance(trusted, str):
        raise ValueError(f"trusted={trusted!r} is a string: give a list of the names of modules")
    chosen = group or dist.group.WORLD
    if not isinstance(chosen, RingProcessGroup):
        raise NotSupported(f"{chosen} is not a group of the backend fedring")
    agent = Agent(
        chosen,
        modules=modules or {},
        offered=collect(trusted),
        max_message_bytes=max_message_bytes,
        timeout=chosen.seconds() if timeout is None else timeout,
        claim=_claim,
    )
    try:
        yield Owners(agent)
        agent.wait_for_all()
    except BaseException as error:
        # The others wait for this rank at the end of their blocks, and would do so forever.
        agent.fail(RingError(f"rank {agent.rank} has left fedring.remote with {type(error).__name__}: {error}"))
        raise
    finally:
        agent.close()


def _claim(agent: Agent, rank: int, key: int | str) -> Reference:
    """Return an agent's own reference to another rank's value.

    Args:
        agent: The agent.
        rank: The other rank.
        key: The number of a third rank's reference there, or the name of a module.

    Raises:
        RemoteError: There is no such reference.
    """
    owner = Owner(agent, rank)
    if isinstance(key, str):
        return owner.module(key)
    return owner.reference(owner.ask(requests.Claim(reference=key))).wait()


def _forget(owner: Owner, key: Future[int | str]) -> None:
    """Tell an owner that a reference is gone.

    It is told once it has told the number.

    This may be called while any lock is held.
    """

    def told(made: Future[int | str]) -> None:
        if (error := made.exception()) is not None:
            if not isinstance(error, RingError):
                log.info("%s: %s", owner.name, error)
        elif isinstance(number := made.result(), int):
            owner.agent.drop(Handle(owner.rank, number))

    key.add_done_callback(told)


def _then(future: Future[Before], convert: Callable[[Before], Then]) -> Future[Then]:
    """Return a future of a converted result.

    `convert` is called with the result of the other future.
    """
    after: Future[Then] = Future()
    after.set_running_or_notify_cancel()  # a call that has been sent cannot be cancelled

    def done(before: Future[Before]) -> None:
        try:
            after.set_result(convert(before.result()))
        except Exception as error:  # noqa: BLE001  # raised again for those who wait
            after.set_exception(error)

    future.add_done_callback(done)
    return after


def _keep(future: Future[Any], *values: Any) -> None:
    """Keep values alive until the future has ended.

    Otherwise the owner might be told before that they are not needed.
    """
    kept = list(values)

    def done(_: object) -> None:
        kept.clear()

    future.add_done_callback(done)
