"""A client's secrets for one round, their keys, and sealed shares.

Keys are derived with X25519 and HKDF-SHA256. The server passes sealed shares on and must not read them:
ChaCha20-Poly1305 (RFC 8439).
"""

import secrets
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedring.secure import SecureError
from fedring.secure.shamir import SECRET_BYTES, SHARE_BYTES
from fedring.signatures.digests import CONTEXT, digest_of

SEALED_BYTES = 2 * SHARE_BYTES + 16
DIGEST_BYTES = 32

_NONCE = bytes(12)
"""Always the same, because each key seals one text."""


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


def seal(key: bytes, masking: bytes, own_mask: bytes) -> bytes:
    """Return two shares, sealed, SEALED_BYTES long.

    Args:
        key: of `share_key`. Nothing else may be sealed with it.
        masking: the share of the sender's masking key.
        own_mask: the share of the seed of its own mask.
    """
    return ChaCha20Poly1305(key).encrypt(_NONCE, masking + own_mask, None)


def unseal(key: bytes, sealed: bytes) -> tuple[bytes, bytes]:
    """Return the two shares of a sender, SHARE_BYTES each.

    They are the share of its masking key and the share of the seed of its own mask.

    Raises:
        SecureError: "bad_share", if they were not sealed with this key.
    """
    try:
        opened = ChaCha20Poly1305(key).decrypt(_NONCE, sealed, None)
    except InvalidTag:
        opened = b""
    if len(opened) != 2 * SHARE_BYTES:
        raise SecureError("bad_share", "a share that another client has sealed does not open")
    return opened[:SHARE_BYTES], opened[SHARE_BYTES:]


def share_digests(roster: bytes, maker: str, holder: str, masking: bytes, own_mask: bytes) -> bytes:
    """Return the digests of two sealed shares, 2 * DIGEST_BYTES.

    The client that seals them tells the server these digests. With them the server checks a share that it is given
    later. It learns nothing of a share that it is not given, because that is one of 2^521.

    Args:
        roster: the digest of the group.
        maker: the client that seals.
        holder: the client that opens.
        masking: the share of the maker's masking key.
        own_mask: the share of the seed of its own mask.
    """
    return share_digest(roster, maker, holder, masking, own_mask=False) + share_digest(
        roster, maker, holder, own_mask, own_mask=True
    )


def share_digest(roster: bytes, maker: str, holder: str, share: bytes, *, own_mask: bool) -> bytes:
    """Return the digest of one share, DIGEST_BYTES.

    The share is of the seed of its maker's own mask, or of its masking key.
    """
    what = "share of own mask" if own_mask else "share of masking key"
    return digest_of(what, [roster, maker.encode(), holder.encode(), share])


def _agree(own: bytes, other: bytes) -> bytes:
    try:
        return X25519PrivateKey.from_private_bytes(own).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:  # the other key has a low order
        raise SecureError("bad_peer_keys", "a client's public key cannot be used") from error


def _derive(secret: bytes, roster: bytes, *names: str) -> bytes:
    info = digest_of("key", [roster, *(name.encode() for name in names)])
    return HKDF(SHA256(), length=SECRET_BYTES, salt=CONTEXT.encode(), info=info).derive(secret)
