"""Jobs that an operator signs before they are sent to a server."""

import secrets
import time
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from fedring.control.calls import MAX_ROWS, Control
from fedring.control.failure import Failure
from fedring.daemon.config import ConfigError, explain
from fedring.daemon.exits import Exit
from fedring.rpc.tls import Tls
from fedring.train.bounds import MAX_SEED
from fedring.train.jobs.job import Job
from fedring.train.jobs.start import FRESH, is_path, version_of
from fedring.train.orders.signed_job import PREFIX, JobOrder, order_of
from fedring.v1 import job_pb2


def sign_job(control: Control, table: Mapping[str, Any]) -> job_pb2.SignedJob:
    """Return a job as its operator signs it, for one server.

    The key is that of the certificate with which `control` is connected. All keys that are missing get their defaults,
    and none that the server has.

    Args:
        control: The connection to the server.
        table: The keys of the job.

    Raises:
        Failure: There is no such certificate, or it is no operator's; or the job is wrong, or leaves its start open.
    """
    try:
        job = Job.model_validate(dict(table))
    except ValidationError as error:
        raise Failure(f"the job: {explain(error, {}, Job)}", Exit.CONFIG) from error
    if job.seed_is_open:
        if job.start != FRESH:
            raise Failure("seed: a signed job that continues a version must set the seed of that version's job")
        job = job.model_copy(update={"seed": secrets.randbelow(MAX_SEED + 1)})
    job = job.model_copy(update={"bounds": job.bounds.model_copy(update={"start_model": _start_model(control, job)})})
    order = order_of(job, control.status().run_id, time.time())
    try:
        return signed_by(order, control.tls)
    except ConfigError as error:
        raise Failure(str(error), Exit.CONFIG) from error


def signed_by(order: JobOrder, tls: Tls) -> job_pb2.SignedJob:
    """Return an order with the signature of a certificate's key.

    Args:
        order: The job.
        tls: Has the certificate and its key.

    Raises:
        ConfigError: If there is none, or it is no operator's, or its key cannot sign.
    """
    # cryptography is imported late: nothing else here needs it
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

    from fedring.rpc.certificates import check_dates, identity_of, load_pair
    from fedring.rpc.identity import Role
    from fedring.signatures.proofs import BadProof, PrivateKey, Proof, sign

    if tls.cert is None or tls.key is None:
        raise ConfigError("only a certificate signs jobs: give --tls-cert and --tls-key, or tls_cert and tls_key")
    pair = load_pair(tls.cert, tls.key)
    check_dates(pair.certificate, str(tls.cert))
    identity = identity_of(pair.certificate)
    if identity is None or identity.role is not Role.OPERATOR:
        raise ConfigError(f"{tls.cert} is no operator's certificate, and no site follows what it signs")
    key = load_pem_private_key(pair.key, None)
    chain = [each.public_bytes(Encoding.DER) for each in x509.load_pem_x509_certificates(pair.chain)]
    try:
        Proof(certificates=tuple(chain)).key()
    except BadProof as error:
        raise ConfigError(f"{tls.cert} cannot prove who signs: {error}") from error
    if not isinstance(key, PrivateKey):
        raise ConfigError(f"{tls.key} holds a key that cannot sign jobs: use ECDSA, RSA or Ed25519")
    text = order.text
    return job_pb2.SignedJob(text=text, signature=sign(key, PREFIX + text), certificates=chain)


def _start_model(control: Control, job: Job) -> str:
    """Return the digest of a job's start model.

    It is empty if the job starts fresh, from values that follow from its seed.

    Raises:
        Failure: The job does not say which model that is.
    """
    named = job.bounds.start_model
    if job.start == FRESH:
        return named
    version = version_of(job.start)
    if not version:
        if named and is_path(job.start):
            return named
        way = "fresh, or the number of a version (flctl models list)"
        raise Failure(f"start = {job.start!r} is left to the server: a signed job names {way}", Exit.USAGE)
    found = next((model.digest for model in control.models(limit=MAX_ROWS) if model.version == version), "")
    if not found:
        raise Failure(f"start = {version}: the server keeps no such version (flctl models list)")
    if named and named != found:
        raise Failure(f"the server's version {version} is {found}, and bounds.start_model is {named}")
    return found
