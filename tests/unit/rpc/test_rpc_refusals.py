"""Refusals: which one ends a group of tasks that serves a call, and what a refused caller reads from it."""

import asyncio

import pytest
from grpc import StatusCode, aio

from fedring.rpc.errors import RETRY_KEY, Gone, Stalled, Superseded, refusal_in, retry_seconds_of


async def fail(error: Exception) -> None:
    raise error


async def serve(*errors: Exception) -> None:
    async with asyncio.TaskGroup() as tasks:
        for error in errors:
            tasks.create_task(fail(error))


async def test_the_refusal_is_taken_out_of_the_group() -> None:
    refusal = Superseded("a newer session took over")
    with pytest.raises(ExceptionGroup) as caught:
        await serve(Gone(), refusal)
    assert refusal_in(caught.value) is refusal


def test_a_caller_that_has_gone_or_stalled_gets_no_refusal() -> None:
    assert refusal_in(ExceptionGroup("", [Gone(), Stalled()])) is None


def test_a_fault_is_raised_and_not_taken_for_a_refusal() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        refusal_in(ExceptionGroup("", [Gone(), KeyError("x"), Superseded()]))
    assert [type(error) for error in caught.value.exceptions] == [KeyError]


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        ("12.5", 12.5),
        ("0", 0),
        ("-1", 0),
        ("1e9", 3600),
        ("nan", 10),
        ("inf", 10),
        ("-inf", 10),
        ("soon", 10),
        ("", 10),
    ],
)
def test_a_caller_keeps_trying_for_a_limited_time_whatever_the_server_says(told: str, seconds: float) -> None:
    trailing = aio.Metadata(("fl-reason", "id_in_use"), (RETRY_KEY, told))
    error = aio.AioRpcError(StatusCode.ALREADY_EXISTS, aio.Metadata(), trailing)
    assert retry_seconds_of(error) == seconds


def test_a_caller_keeps_trying_for_ten_seconds_if_the_server_names_no_time() -> None:
    assert retry_seconds_of(aio.AioRpcError(StatusCode.ALREADY_EXISTS, aio.Metadata(), aio.Metadata())) == 10
