"""Shares on their way between two clients, which the server must not read: ChaCha20-Poly1305 (RFC 8439)."""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedring.secure.errors import SecureError
from fedring.secure.shamir import SHARE_BYTES

SEALED_BYTES = 2 * SHARE_BYTES + 16

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
