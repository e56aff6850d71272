"""The signature of an operator under a job, checked at a site."""

import hashlib
import logging
import time
from collections.abc import Collection
from datetime import UTC, datetime

from cryptography import x509

from fedring.daemon.config import ConfigError
from fedring.rpc.certificates import check_dates, identity_of, load_authorities
from fedring.rpc.identity import Role
from fedring.rpc.revocation import Revocations, serial_of
from fedring.rpc.tls import Tls
from fedring.signatures.proofs import BadProof, Proof, check_chain, verify
from fedring.train.orders.signed_job import PREFIX, BadOrder, JobOrder, read_order
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

_SKEW_SECONDS = 3600  # a clock may be late by so much
_MOST_KNOWN = 64  # signed jobs that need not be read again


class Operators:
    """Checks who has signed a job.

    Args:
        allowed: The names of the operators whose jobs the site follows.
        tls: Its certificates: `ca` is the authority of operators, too, and `crl` its list of revoked certificates.

    Raises:
        ConfigError: If a file of these cannot be used.
    """

    def __init__(self, allowed: Collection[str], tls: Tls) -> None:
        self._allowed, self._ca = allowed, tls.ca
        self._authorities = load_authorities(tls.ca) if tls.ca else []
        self._revoked = Revocations(tls.crl, tls.ca)
        self._known: dict[bytes, tuple[JobOrder, list[x509.Certificate]]] = {}  # whose signatures are good

    def check(self, job: pb.JobSpec) -> tuple[JobOrder, str]:
        """Return the job that an operator has signed, and the operator's name.

        Args:
            job: What a command says of its job.

        Raises:
            BadOrder: If nobody who may has signed it, or not for now.
        """
        if not job.HasField("signed"):
            text = "nobody has signed this job, and this site follows only jobs that an operator has signed"
            raise BadOrder("not_signed", f"{text}: queue it with flctl run --sign")
        order, chain = self._verified(job.signed)
        name = self._name_in(chain)
        now = time.time()
        if now < order.at - _SKEW_SECONDS:
            text = f"{name} signed this job at {_day(order.at)}, and the clock of this site says {_day(now)}"
            raise BadOrder("wrong_time", f"{text}: check both clocks")
        if now >= order.until:
            text = (
                f"the signature of {name} has ended at {_day(order.until)}, and the clock of this site says {_day(now)}"
            )
            raise BadOrder("wrong_time", f"{text}: sign the job again (bounds.days)")
        return order, name

    def _verified(self, signed: pb.SignedJob) -> tuple[JobOrder, list[x509.Certificate]]:
        """Return the text and the certificates of a good signature.

        What does not change with time is checked once for each signed job.
        """
        key = hashlib.sha256(signed.SerializeToString(deterministic=True)).digest()
        if (known := self._known.get(key)) is not None:
            return known
        proof = Proof(certificates=tuple(signed.certificates))
        try:
            verify(proof.key(), signed.signature, PREFIX + signed.text)
            chain = proof.chain()
        except BadProof as error:
            raise BadOrder("bad_signature", f"the signature of this job proves nothing: {error}") from error
        found = read_order(signed), chain
        while len(self._known) >= _MOST_KNOWN:
            self._known.pop(next(iter(self._known)), None)  # another thread may have dropped it
        self._known[key] = found
        return found

    def _name_in(self, chain: list[x509.Certificate]) -> str:
        """Return the operator's name in certificates.

        Raises:
            BadOrder: If they are not an operator's whom the site allows, or not good now.
        """
        identity = identity_of(chain[0])
        if identity is None or identity.role is not Role.OPERATOR:
            raise BadOrder("unknown_operator", f"who has signed this job is no operator, but {identity or 'unnamed'}")
        try:
            for certificate in chain:
                check_dates(certificate, f"the signature of {identity.name}")
            check_chain(chain, self._authorities_now())
        except ConfigError as error:
            raise BadOrder("wrong_time", str(error)) from error
        except BadProof as error:
            text = f"the certificate of the operator {identity.name} is not good here: {error}"
            raise BadOrder("unknown_operator", text) from error
        if any(self._revoked.holds(serial_of(each)) for each in chain):
            raise BadOrder("revoked_operator", f"the certificate of the operator {identity.name} is revoked")
        if identity.name not in self._allowed:
            names = ", ".join(sorted(self._allowed))
            text = f"the operator {identity.name} has signed this job, and this site follows only {names}"
            raise BadOrder("unknown_operator", f"{text} (approval.allowed_operators)")
        return identity.name

    def _authorities_now(self) -> list[x509.Certificate]:
        """Return the authorities in the file, which may have been replaced since."""
        if self._ca is not None:
            try:
                self._authorities = load_authorities(self._ca)
            except ConfigError as error:  # the file is being written: the next command looks again
                log.warning("the authorities of operators cannot be read, so the last ones stay in use: %s", error)
        return self._authorities


def _day(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"
