"""What TLS says at an address, in words for people: gRPC tells of a handshake that failed in those of its library."""

import socket
import ssl
from dataclasses import dataclass

from fedring.rpc.channel import encrypts
from fedring.rpc.tls import Tls

_WRONG_NAME = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a daemon with that `tls` reaches nobody, and what to do."""

    found: str
    advice: str


def shown_at(address: str, timeout_seconds: float) -> bytes:
    """The certificate, in DER, that is shown there to anybody; empty if none is."""
    try:
        return _handshake(address, _trusting_all(), timeout_seconds)
    except OSError:
        return b""


def trouble_at(address: str, tls: Tls, timeout_seconds: float) -> Trouble:
    """What a handshake of our own tells of an address at which nobody serves who shows, and trusts, what `tls` says."""
    encrypted = encrypts(address, tls)
    context = ssl.create_default_context(cafile=tls.ca) if encrypted else _trusting_all()
    try:
        _handshake(address, context, timeout_seconds)
    except ssl.SSLCertVerificationError as error:
        reason = error.verify_message.rstrip(".")
        if error.verify_code in _WRONG_NAME:
            advice = "name the server as its certificate does, or issue it one for this name: flctl certs issue"
        else:
            advice = "set tls.ca to the certificate of the authority that signed the server's: its ca.crt"
        return Trouble(f"{address} shows a certificate that is not trusted: {reason}", advice)
    except (ssl.SSLError, ConnectionResetError, BrokenPipeError):
        if not encrypted:
            return Trouble(f"what listens at {address} is no fl-server", "correct the address")
        return Trouble(f"{address} speaks no TLS", "give fl-server there tls.cert and tls.key, or correct the address")
    except OSError as error:
        advice = "start fl-server, or correct the address; if a firewall is between, open the port"
        return Trouble(f"{address} is unreachable: {error.strerror or error}", advice)
    if not encrypted:
        return Trouble(f"{address} speaks TLS", "set tls.ca, and tls.cert with tls.key if the server asks for them")
    what = f"the certificate in {tls.cert}" if tls.cert else "a caller without a certificate"
    advice = "set tls.cert and tls.key to a certificate of the server's authority: flctl certs issue"
    return Trouble(f"{address} does not accept {what}", advice)


def _handshake(address: str, context: ssl.SSLContext, timeout_seconds: float) -> bytes:
    """What the other side shows. With TLS 1.3 it looks at ours only later, so none is shown."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), timeout_seconds) as plain,
        context.wrap_socket(plain, server_hostname=host) as encrypted,
    ):
        return encrypted.getpeercert(binary_form=True) or b""


def _trusting_all() -> ssl.SSLContext:
    """Nothing that matters is told to whoever answers."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
