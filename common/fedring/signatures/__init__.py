"""Signatures: proofs of who has signed, and digests to sign.

`proofs` has the keys and certificates by which clients and operators prove who they are, and `digests` names a task in
32 bytes, which clients and servers compare or sign. The package is pure: it reads no file, and sends nothing. It may
import no other package of fedring.
"""
