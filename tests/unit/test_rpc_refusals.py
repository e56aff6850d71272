"""What a group of tasks that serves one call ends with."""

import asyncio

import pytest

from fedring.rpc.errors import Gone, Stalled, Superseded, refusal_in


async def fail(error: Exception) -> None:
    raise error


async def serve(*errors: Exception) -> None:
    async with asyncio.TaskGroup() as tasks:
        for error in errors:
            tasks.create_task(fail(error))


async def test_the_refusal_comes_out_by_itself() -> None:
    refusal = Superseded("a newer session took over")
    with pytest.raises(ExceptionGroup) as caught:
        await serve(Gone(), refusal)
    assert refusal_in(caught.value) is refusal


def test_a_caller_that_is_gone_or_stalled_is_told_nothing() -> None:
    assert refusal_in(ExceptionGroup("", [Gone(), Stalled()])) is None


def test_a_fault_is_no_refusal() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        refusal_in(ExceptionGroup("", [Gone(), KeyError("x"), Superseded()]))
    assert [type(error) for error in caught.value.exceptions] == [KeyError]
