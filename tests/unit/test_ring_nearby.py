"""The socket between ranks of one host: who may connect, and who waits for what."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from tests.conftest import missing
from tests.ring_endpoints import SECONDS

from fedring.ring.transport import local as nearby
from fedring.ring.transport.frames import MAX_PAYLOAD
from fedring.ring.transport.local import Door, Inlet, Outlet, prefixed

NOBODY = 65534
KNOCK = """
import socket, sys
guest = socket.socket(socket.AF_UNIX)
guest.connect(bytes.fromhex(sys.argv[1]))
guest.send(bytes.fromhex(sys.argv[2]))
print("ready", flush=True)
sys.stdin.read()
"""
LISTEN = """
import socket, sys
door = socket.socket(socket.AF_UNIX)
door.bind(bytes.fromhex(sys.argv[1]))
door.listen()
print("ready", flush=True)
sys.stdin.read()
"""


def connected() -> tuple[Outlet, Inlet]:
    door = Door()
    inlet = Inlet(door.secret)
    outlet = door.open()
    assert outlet is not None
    return outlet, inlet


def test_a_message_larger_than_the_buffers_comes_whole() -> None:
    outlet, inlet = connected()
    message = os.urandom(MAX_PAYLOAD)
    rest = outlet.offer(prefixed(message))
    assert 0 < len(rest) < len(message)
    assert len(outlet.offer(b"more")) == 4
    pushing = threading.Thread(target=outlet.push, args=(rest,))
    pushing.start()
    assert next(inlet.messages()) == message
    pushing.join(SECONDS)
    outlet.close()
    inlet.close()


def test_who_waits_for_room_is_woken_by_the_cut() -> None:
    outlet, inlet = connected()
    pushing = threading.Thread(target=outlet.push, args=(prefixed(bytes(MAX_PAYLOAD)),))
    pushing.start()
    closing = threading.Thread(target=outlet.close)
    closing.start()
    for thread in (pushing, closing):
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert not list(inlet.messages()), "half a message is none"
    inlet.close()


def test_who_waits_for_a_message_is_woken_by_the_end() -> None:
    outlet, inlet = connected()
    assert not outlet.offer(prefixed(b"last"))
    came: list[bytes] = []
    reading = threading.Thread(target=lambda: came.extend(inlet.messages()))
    reading.start()
    inlet.end()
    reading.join(SECONDS)
    assert not reading.is_alive()
    assert came == [b"last"]
    assert not outlet.offer(b"lost"), "nobody waits to send it again"
    outlet.close()
    inlet.close()


def test_who_does_not_know_the_secret_is_sent_away_unheard() -> None:
    door = Door()
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for stranger, words in zip(strangers, (b"", b"open", bytes(16)), strict=True):
        stranger.connect(nearby._address(door.secret))
        stranger.send(words)
    inlet, late = Inlet(door.secret), Inlet(door.secret)
    outlet = door.open()
    assert outlet is not None
    assert not outlet.offer(prefixed(b"for a friend"))
    outlet.close()
    assert list(inlet.messages()) == [b"for a friend"]
    assert list(late.messages()) == [], "a second one is sent away, too"
    for stranger in strangers:
        with suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
        stranger.close()
    for end in (inlet, late):
        end.close()


def test_a_door_at_which_nobody_stands_leads_nowhere_and_is_closed() -> None:
    door = Door()
    assert door.open() is None
    with pytest.raises(ConnectionRefusedError):
        Inlet(door.secret)


def runs_for_nobody(python: str) -> bool:
    try:
        return subprocess.run([python, "-I", "-S", "-c", ""], user=NOBODY, cwd="/", check=False).returncode == 0
    except OSError:
        return False


@pytest.fixture
def nobody() -> Iterator[Callable[..., None]]:
    """Runs code in a process of another user, which goes on until the end of the test."""
    python = next((path for path in (sys.executable, "/usr/bin/python3") if runs_for_nobody(path)), "")
    if not python:
        missing("the right to start Python as another user")
    with ExitStack() as stack:

        def run(code: str, *words: bytes) -> None:
            command = [python, "-I", "-S", "-c", code, *(word.hex() for word in words)]
            pipe = subprocess.PIPE
            process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, user=NOBODY, cwd="/"))
            assert process.stdin
            assert process.stdout
            stack.callback(process.stdin.close)
            assert process.stdout.readline() == b"ready\n"

        yield run


def test_another_users_process_is_sent_away_even_with_the_secret(nobody: Callable[..., None]) -> None:
    door = Door()
    nobody(KNOCK, nearby._address(door.secret).encode(), door.secret)
    assert door.open() is None


def test_a_receiver_does_not_talk_to_another_users_door(nobody: Callable[..., None]) -> None:
    secret = os.urandom(16)
    nobody(LISTEN, nearby._address(secret).encode())
    with pytest.raises(PermissionError):
        Inlet(secret)
