"""TLS handshakes that explain to people why a connection fails.

gRPC only repeats the words of its TLS library, or says "Socket closed".
"""

import ssl
from dataclasses import dataclass

from fedring.rpc.channel import encrypts
from fedring.rpc.probe import connection_to, proxy_for
from fedring.rpc.tls import Tls

_WRONG_NAME = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause of a failed connection, and the remedy."""

    found: str
    advice: str


def shown_at(address: str, timeout_seconds: float) -> bytes:
    """Return the server certificate shown at the address, in DER.

    Empty if none is shown.
    """
    try:
        return _handshake(address, _trusting_all(), timeout_seconds)
    except OSError:
        return b""


def diagnose(address: str, tls: Tls, timeout_seconds: float) -> Diagnosis:
    """Find out by a handshake why a server cannot be used.

    `tls` are the certificates of the daemon that wants to use it.
    """
    encrypted = encrypts(address, tls)
    try:
        context = ssl.create_default_context(cafile=tls.ca) if encrypted else _trusting_all()
    except OSError as error:  # it is being replaced
        return Diagnosis(f"{tls.ca} cannot be used: {error.strerror or error}", "correct tls.ca")
    try:
        _handshake(address, context, timeout_seconds)
    except ssl.SSLCertVerificationError as error:
        reason = error.verify_message.rstrip(".")
        if error.verify_code in _WRONG_NAME:
            advice = "use a name that the server's certificate has, or issue one for this name: flctl certs issue"
        else:
            advice = "set tls.ca to the ca.crt of the authority that signed the server's certificate"
            if proxy := proxy_for(address):
                advice += f"; if the proxy {proxy} reads what passes (TLS inspection), exempt {address} from that there"
        return Diagnosis(f"{address} shows a certificate that is not trusted: {reason}", advice)
    except (ssl.SSLError, ConnectionResetError, BrokenPipeError):
        if not encrypted:
            return Diagnosis(f"what listens at {address} is no fl-server", "correct the address")
        return Diagnosis(f"{address} does not use TLS", "set tls.cert and tls.key of fl-server, or correct the address")
    except OSError as error:
        advice = "start fl-server, or correct the address; if there is a firewall in between, open the port"
        if proxy := proxy_for(address):
            advice = f"have the proxy {proxy} (https_proxy) allow CONNECT to {address}, or name the host in no_proxy"
        return Diagnosis(f"{address} is unreachable: {error.strerror or error}", advice)
    if not encrypted:
        return Diagnosis(f"{address} uses TLS", "set tls.ca, and tls.cert with tls.key if the server asks for them")
    if _rejects(address, tls, context, timeout_seconds):
        what = f"the certificate in {tls.cert}" if tls.cert else "a caller without a certificate"
        advice = "set tls.cert and tls.key to a certificate that the server's authority has signed: flctl certs issue"
        return Diagnosis(f"{address} does not accept {what}", advice)
    return Diagnosis(f"{address} is reachable, and takes the certificate", "try again, or read the log of fl-server")


def _rejects(address: str, tls: Tls, context: ssl.SSLContext, timeout_seconds: float) -> bool:
    """Return whether the server ends a connection because of the caller's certificate.

    With TLS 1.3 the server looks at it after the handshake. A server of HTTP/2 speaks first if all is well, so reading
    tells.
    """
    try:
        if tls.cert:
            context.load_cert_chain(tls.cert, tls.key)
        _handshake(address, context, timeout_seconds, read=True)
    except TimeoutError:
        return False
    except OSError:  # an SSLError is one: the server's alert
        return True
    return False


def _handshake(address: str, context: ssl.SSLContext, timeout_seconds: float, *, read: bool = False) -> bytes:
    """Return the certificate of the server.

    Args:
        address: "host:port".
        context: What is trusted, and which certificate is shown; usually none.
        timeout_seconds: How long to wait for each step.
        read: Whether to read from the server; an OSError if it only ends the connection.
    """
    host = address.rpartition(":")[0].strip("[]")
    context.set_alpn_protocols(["h2"])
    with (
        connection_to(address, timeout_seconds) as plain,
        context.wrap_socket(plain, server_hostname=host) as encrypted,
    ):
        if read and not encrypted.recv(1):
            raise ConnectionResetError
        return encrypted.getpeercert(binary_form=True) or b""


def _trusting_all() -> ssl.SSLContext:
    """Return a context that trusts every server.

    This is safe since nothing is sent to it.
    """
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
