"""The socket between ranks of one host: who may connect, and who waits for what."""

import os
import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from tests.ring_endpoints import SECONDS

from fedring.ring.transport.frames import MAX_PAYLOAD
from fedring.ring.transport.local import SocketListener, SocketReceiver, SocketSender, prefixed, socket_name


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


@pytest.fixture
def as_another_user(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which all processes of this user are those of another user."""
    own = os.getuid()
    return lambda: monkeypatch.setattr(os, "getuid", lambda: own + 1)


def test_a_process_of_another_user_is_sent_away_even_with_the_secret(as_another_user: Callable[[], None]) -> None:
    listener = SocketListener()
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(socket_name(listener.secret))
    stranger.send(listener.secret)
    as_another_user()
    assert listener.accept() is None
    stranger.close()


def test_a_receiver_refuses_the_listener_of_another_user(as_another_user: Callable[[], None]) -> None:
    listener = SocketListener()
    as_another_user()
    with pytest.raises(PermissionError):
        SocketReceiver(listener.secret)
    assert listener.accept() is None
