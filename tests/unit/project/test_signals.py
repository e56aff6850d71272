"""Signals that the system gives to another thread than the main one, which waits."""

import subprocess
from concurrent.futures import Future

import pytest
from tests.forks import Fork

from fedring.daemon.signals import result_of

SECONDS = 60


@pytest.mark.parametrize("waits_for", ["event", "future", "task"])
def test_a_signal_ends_the_wait_of_the_main_thread_whichever_thread_gets_it(waits_for: str) -> None:
    with Fork("tests.waits_for_signal", [waits_for], stdout=subprocess.PIPE) as waiting:
        try:
            assert waiting.wait(SECONDS) == 0
        finally:
            waiting.kill()


def test_a_timeout_that_is_the_result_is_raised() -> None:
    future: Future[None] = Future()
    future.set_exception(TimeoutError("of the call"))
    with pytest.raises(TimeoutError, match="of the call"):
        result_of(future)
