"""Shares on their way between two clients, which the server must not read: ChaCha20-Poly1305 (RFC 8439)."""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedring.secure.errors import SecureError
from fedring.secure.shamir import SHARE_BYTES
from fedring.secure.statements import digest_of

SEALED_BYTES = 2 * SHARE_BYTES + 16
DIGEST_BYTES = 32

_NONCE = bytes(12)
"""Always the same, because each key seals one text."""


def seal(key: bytes, masking: bytes, own_mask: bytes) -> bytes:
    """Return two shares, sealed, SEALED_BYTES long.

    Args:
        key: of `fedring.secure.keys.share_key`. Nothing else may be sealed with it.
        masking: the share of the sender's masking key.
        own_mask: the share of the seed of its own mask.
    """
    return ChaCha20Poly1305(key).encrypt(_NONCE, masking + own_mask, None)


def unseal(key: bytes, sealed: bytes) -> tuple[bytes, bytes]:
    """Return the shares of the sender's masking key and of the seed of its own mask, SHARE_BYTES each.

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
    """Return what a client tells the server of two shares that it seals, 2 * DIGEST_BYTES.

    With it the server checks a share that it is given later. It learns nothing of a share that it is not given, because
    that is one of 2^521.

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
    """Return the digest of one share, of the seed of its maker's own mask or of its masking key, DIGEST_BYTES."""
    what = "share of own mask" if own_mask else "share of masking key"
    return digest_of(what, [roster, maker.encode(), holder.encode(), share])
