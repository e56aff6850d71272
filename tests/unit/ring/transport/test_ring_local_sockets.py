"""The socket between ranks of one host: who may connect, and who waits for what."""

import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from tests.conftest import missing
from tests.ring_endpoints import SECONDS

from fedring.ring.transport.frames import MAX_PAYLOAD
from fedring.ring.transport.local import SocketListener, SocketReceiver, SocketSender, prefixed, socket_name

NOBODY = 65534
CONNECT = """
import socket, sys
caller = socket.socket(socket.AF_UNIX)
caller.connect(bytes.fromhex(sys.argv[1]))
caller.send(bytes.fromhex(sys.argv[2]))
print("ready", flush=True)
sys.stdin.read()
"""
LISTEN = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(bytes.fromhex(sys.argv[1]))
listener.listen()
print("ready", flush=True)
sys.stdin.read()
"""


def connected() -> tuple[SocketSender, SocketReceiver]:
    listener = SocketListener()
    receiver = SocketReceiver(listener.secret)
    sender = listener.accept()
    assert sender is not None
    return sender, receiver


def test_a_message_larger_than_the_buffers_comes_whole() -> None:
    sender, receiver = connected()
    message = random.randbytes(MAX_PAYLOAD)
    rest = sender.offer(prefixed(message))
    assert 0 < len(rest) < len(message)
    assert len(sender.offer(b"more")) == 4
    pushing = threading.Thread(target=sender.push, args=(rest,))
    pushing.start()
    assert next(receiver.messages()) == message
    pushing.join(SECONDS)
    sender.close()
    receiver.close()


def test_a_sender_that_waits_for_room_is_woken_by_the_cut() -> None:
    sender, receiver = connected()
    pushing = threading.Thread(target=sender.push, args=(prefixed(bytes(MAX_PAYLOAD)),))
    pushing.start()
    closing = threading.Thread(target=sender.close)
    closing.start()
    for thread in (pushing, closing):
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert not list(receiver.messages()), "half a message was received"
    receiver.close()


def test_a_receiver_that_waits_for_a_message_is_woken_by_the_end() -> None:
    sender, receiver = connected()
    assert not sender.offer(prefixed(b"last"))
    came: list[bytes] = []
    reading = threading.Thread(target=lambda: came.extend(receiver.messages()))
    reading.start()
    receiver.end()
    reading.join(SECONDS)
    assert not reading.is_alive()
    assert came == [b"last"]
    assert not sender.offer(b"lost"), "a message to a receiver that is gone is kept"
    sender.close()
    receiver.close()


def test_a_caller_that_does_not_know_the_secret_is_sent_away() -> None:
    listener = SocketListener()
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for stranger, words in zip(strangers, (b"", b"open", bytes(16)), strict=True):
        stranger.connect(socket_name(listener.secret))
        stranger.send(words)
    receiver, late = SocketReceiver(listener.secret), SocketReceiver(listener.secret)
    sender = listener.accept()
    assert sender is not None
    assert not sender.offer(prefixed(b"for the receiver"))
    sender.close()
    assert list(receiver.messages()) == [b"for the receiver"]
    assert list(late.messages()) == [], "a second receiver was served, too"
    for stranger in strangers:
        with suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
        stranger.close()
    for end in (receiver, late):
        end.close()


def test_a_listener_to_which_nobody_has_connected_accepts_nobody_and_closes() -> None:
    listener = SocketListener()
    assert listener.accept() is None
    with pytest.raises(ConnectionRefusedError):
        SocketReceiver(listener.secret)


def runs_for_nobody(python: str) -> bool:
    try:
        return subprocess.run([python, "-I", "-S", "-c", ""], user=NOBODY, cwd="/", check=False).returncode == 0
    except OSError:
        return False


@pytest.fixture
def nobody() -> Iterator[Callable[..., None]]:
    """Return a function that runs code in a process of another user, until the end of the test."""
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


def test_a_process_of_another_user_is_sent_away_even_with_the_secret(nobody: Callable[..., None]) -> None:
    listener = SocketListener()
    nobody(CONNECT, socket_name(listener.secret).encode(), listener.secret)
    assert listener.accept() is None


def test_a_receiver_refuses_the_listener_of_another_user(nobody: Callable[..., None]) -> None:
    secret = os.urandom(16)
    nobody(LISTEN, socket_name(secret).encode())
    with pytest.raises(PermissionError):
        SocketReceiver(secret)
