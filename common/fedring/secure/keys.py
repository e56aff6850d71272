"""A client's secrets for one round, and the keys derived from them.

Keys are derived with X25519 and HKDF-SHA256.
"""

import secrets
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedring.secure.errors import SecureError
from fedring.signatures.digests import CONTEXT, digest_of

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, repr=False)
class RoundSecrets:
    """A client's own secrets of one round, 32 random bytes each."""

    sealing: bytes  # X25519 private key of the shares
    masking: bytes  # X25519 private key of the masks that pairs of clients have in common
    own_mask: bytes  # seed of the client's own mask


def draw_secrets() -> RoundSecrets:
    """Return new secrets from the operating system's random numbers."""
    return RoundSecrets(*(secrets.token_bytes(SECRET_BYTES) for _ in range(3)))


def public_key(private: bytes) -> bytes:
    """Return the X25519 public key of a private one, 32 bytes each."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def commitment(own_mask: bytes) -> bytes:
    """Return the commitment to the seed of a client's own mask.

    It has 32 bytes, and is told before the seed.
    """
    return digest_of("own mask", [own_mask])


def share_key(own: bytes, other: bytes, roster: bytes, sender: str, receiver: str) -> bytes:
    """Return the key that seals one client's shares for another.

    It has 32 bytes, and seals one text only.

    Args:
        own: the sealing key of one of them, private.
        other: that of the other, public.
        roster: the digest of their group.
        sender: the client that seals.
        receiver: the client that opens.
    """
    return _derive(_agree(own, other), roster, "share", sender, receiver)


def pair_seed(own: bytes, other: bytes, roster: bytes, first: str, second: str) -> bytes:
    """Return the seed of the mask that two clients share, 32 bytes.

    Args:
        own: the masking key of one of them, private.
        other: that of the other, public.
        roster: the digest of their group.
        first: the one of lower client id, which adds the mask.
        second: the other, which subtracts it.
    """
    return _derive(_agree(own, other), roster, "pair", first, second)


def own_seed(own_mask: bytes, roster: bytes, client: str) -> bytes:
    """Return the seed of a client's own mask, 32 bytes."""
    return _derive(own_mask, roster, "own", client)


def _agree(own: bytes, other: bytes) -> bytes:
    try:
        return X25519PrivateKey.from_private_bytes(own).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:  # the other key has a low order
        raise SecureError("bad_peer_keys", "a client's public key cannot be used") from error


def _derive(secret: bytes, roster: bytes, *names: str) -> bytes:
    info = digest_of("key", [roster, *(name.encode() for name in names)])
    return HKDF(SHA256(), length=SECRET_BYTES, salt=CONTEXT.encode(), info=info).derive(secret)
