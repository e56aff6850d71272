"""Makes the secrets of simulated clients from one."""

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedring.privacy.keystream import SECRET_BYTES

_SALT = b"fedring simulation 1"


def client_secret(secret: bytes, client: str) -> bytes:
    """Return the secret of a simulated client, 32 bytes.

    A real one has it in the file `secret` of its state folder.

    Args:
        secret: That of the simulation.
        client: The client's id, such as client-0.
    """
    return HKDF(SHA256(), length=SECRET_BYTES, salt=_SALT, info=b"client|" + client.encode()).derive(secret)


def secret_of_seed(seed: int) -> bytes:
    """Return the secret of a simulation that was given none, 32 bytes."""
    return HKDF(SHA256(), length=SECRET_BYTES, salt=_SALT, info=b"seed").derive(str(seed).encode())
