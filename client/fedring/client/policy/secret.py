"""Random numbers that one client can repeat, and nobody else.

In a job that hides single clients, whoever could compute how a client has trained could subtract that, and one update
would be left of a sum. So the client's random choices follow from a secret of its own, 32 bytes in the file `secret` of
its state folder, after a line with their SHA-256, and from the task:

    HKDF-SHA256(secret, salt = "fedring client secret 1", info = PURPOSE | digest of the task)

The same task gives the same bytes, in a process that was started anew, too: who asks again learns nothing new. Any
other task gives others: another base, round, learning rate or seed.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedring.daemon.config import ConfigError
from fedring.daemon.durable import create_durably, replace_with_digest, text_after_digest, with_digest
from fedring.privacy.keystream import SECRET_BYTES
from fedring.rpc.certificates import read_secretly
from fedring.signatures.digests import digest_of
from fedring.v1 import federation_pb2 as pb

SECRET_FILE = "secret"
TRAINING, DITHER = "training", "dither"
"""The purposes: the seed of a training, and the dither that is added to its update before that is rounded."""

_SALT = b"fedring client secret 1"
_SET_ASIDE = (
    "run_id",
    "epoch",
    "model_version",
    "residual_after_epoch",
    "max_update_bytes",
    "deadline_seconds",
    "model",
    "traceparent",
)


class ClientSecret:
    """The secret of a client. Any thread may use it.

    Args:
        read: Returns its 32 bytes; is called when they are needed first.
    """

    def __init__(self, read: Callable[[], bytes]) -> None:
        self._read, self._value = read, b""
        self._lock = threading.Lock()

    def derive(self, command: pb.TrainCmd, purpose: str) -> bytes:
        """Return 32 bytes for one purpose in the task of a command.

        Raises:
            ConfigError: If the secret cannot be read, or made.
        """
        with self._lock:
            self._value = self._value or self._read()
        info = purpose.encode() + b"|" + work_digest(command)
        return HKDF(SHA256(), length=SECRET_BYTES, salt=_SALT, info=info).derive(self._value)


def kept_secret(state_dir: Path) -> ClientSecret:
    """Return the secret of a state folder, made when first needed.

    Raises:
        ConfigError: If the file is there, and damaged.
    """
    path = state_dir / SECRET_FILE
    if path.exists():
        secret = _read(path)  # once: later damage of the file must not change what is trained
        return ClientSecret(lambda: secret)
    return ClientSecret(lambda: _read_or_make(path))


def work_digest(command: pb.TrainCmd) -> bytes:
    """Return the digest of a command's work, 32 bytes.

    It covers all of the command except the fields that only name its server and job, or concern its transport.
    """
    work = pb.TrainCmd()
    work.CopyFrom(command)
    for field in _SET_ASIDE:
        work.ClearField(field)  # type: ignore[arg-type]  # the names are known to be fields
    work.job.ClearField("job_id")
    work.job.ClearField("name")
    return digest_of("work", [work.SerializeToString(deterministic=True)])


def _read_or_make(path: Path) -> bytes:
    if not path.exists():
        try:
            create_durably(path, with_digest(os.urandom(SECRET_BYTES)))
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return _read(path)


def _read(path: Path) -> bytes:
    data = read_secretly(path)
    try:
        if len(data) == SECRET_BYTES:  # of an earlier version, or by hand
            replace_with_digest(path, data)
            return data
        secret = text_after_digest(data)
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"it holds {len(secret)} bytes in the place of {SECRET_BYTES}")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} says how this client makes its random choices, and cannot be used ({error}): restore it, or "
            "remove it, and this client trains the same tasks in another way from then on"
        ) from error
    return secret
