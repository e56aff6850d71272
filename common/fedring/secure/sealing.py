"""Sealed shares on their way between two clients.

The server passes them on and must not read them: ChaCha20-Poly1305 (RFC 8439).
"""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedring.secure.errors import SecureError
from fedring.secure.shamir import SHARE_BYTES
from fedring.signatures.digests import digest_of

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
