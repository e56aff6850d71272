"""flctl certs: a certificate authority in a folder.

It makes and renews certificates for a fleet.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from cryptography import x509

from fedring.control.failure import Failure
from fedring.ctl.admin.authority import (
    CRL,
    alone_in,
    issued,
    load_authority,
    make_authority,
    names_for,
    replace_file,
    revoked,
    write_pair,
)
from fedring.ctl.options import OutputOption
from fedring.ctl.output import Output, print_json, print_table
from fedring.daemon.config import ConfigError
from fedring.daemon.exits import Exit
from fedring.daemon.wording import counted
from fedring.rpc.certificates import identity_of, load_authorities, names_of
from fedring.rpc.identity import NAME, Identity, Role

_SERIAL_BITS = 159
"""RFC 5280, section 4.1.2.2: a serial number is positive, and has at most 20 bytes."""

_LOCAL_HOST = ("localhost", "127.0.0.1", "::1")
_AUTHORITY_DAYS = 3650
_RENEW_DAYS = 30

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the authority and its certificates.")]
Hosts = Annotated[
    list[str] | None,
    typer.Option("--host", metavar="NAME", help="Name or address of the server's host; may be given several times."),
]
Days = Annotated[int, typer.Option(min=1, max=_AUTHORITY_DAYS, help="Days that the certificates are valid.")]


def init(folder: Folder, host: Hosts = None, days: Days = 365) -> None:
    """Make an authority, and certificates for the server and the operator.

    Keep DIR/ca.key away from servers and clients.
    Whoever has it can make a certificate for any name.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"cannot make {folder}: {error.strerror}", Exit.USAGE) from error
    hosts: list[str] = [*_LOCAL_HOST, *(name for name in host or [] if name not in _LOCAL_HOST)]
    identities: dict[Role, list[str]] = {Role.SERVER: hosts, Role.OPERATOR: []}
    paths = [path for name in ("ca", *identities) for path in (folder / f"{name}.crt", folder / f"{name}.key")]
    with alone_in(folder):
        if old := [str(path) for path in paths if path.exists()]:
            raise Failure(f"{', '.join(old)} exists already: use another folder, or `flctl certs renew {folder}`")
        signed = {role: names_for(Identity(role, str(role)), names) for role, names in identities.items()}
        authority = make_authority(_AUTHORITY_DAYS)
        write_pair(folder, "ca", authority.certificate, authority.key)
        replace_file(folder / CRL, authority.revoke([], {}))
        for role, names in signed.items():
            write_pair(folder, str(role), *authority.sign(Identity(role, str(role)), names, days))
    print(f"{folder} has an authority, server.crt for {', '.join(hosts)}, and operator.crt")


def issue(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="Whose certificate it is: the client_id of a client.")],
    role: Annotated[Role, typer.Option(help="What the certificate allows.")] = Role.CLIENT,
    host: Hosts = None,
    days: Days = 365,
) -> None:
    """Make a certificate and its key: DIR/NAME.crt and DIR/NAME.key."""
    if not NAME.fullmatch(name) or name in ("ca", ".", ".."):
        raise Failure(
            f"{name!r} is no valid name: use 1 to 128 characters of A-Z a-z 0-9 . _ -, but not ca", Exit.USAGE
        )
    if host and role is not Role.SERVER:
        raise Failure(f"--host is for servers: a {role} is known by its name, on whichever host it runs", Exit.USAGE)
    identity = Identity(role, name)
    names = names_for(identity, [*_LOCAL_HOST, *(host or [])] if role is Role.SERVER else [])
    authority = load_authority(folder)
    with alone_in(folder):
        write_pair(folder, name, *authority.sign(identity, names, days))
    print(f"{folder / name}.crt is the certificate of {identity}")


def renew(
    folder: Folder,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="Certificates to renew; by default those that end within 30 days and are valid."
        ),
    ] = None,
    days: Days = 365,
) -> None:
    """Renew certificates, with new keys and the same names.

    Daemons load them without a restart. The authority's own certificate, `ca`, keeps its key, so what it has signed
    stays valid.
    """
    authority = load_authority(folder)
    with alone_in(folder):
        due = [row for row in _rows(folder) if row["days_left"] < _RENEW_DAYS and not row["revoked"]]
        wanted = names or [row["name"] for row in due]
        if "ca" in wanted:
            authority = make_authority(_AUTHORITY_DAYS, authority.key)
            write_pair(folder, "ca", authority.certificate, authority.key, replace=True)
        for name in wanted:
            if name == "ca":
                continue
            old = _load(folder / f"{name}.crt")
            identity = identity_of(old)
            if identity is None:
                raise Failure(f"{folder / name}.crt has no fedring identity: make a new one with `flctl certs issue`")
            others = [known for known in names_of(old) if not isinstance(known, x509.UniformResourceIdentifier)]
            write_pair(folder, name, *authority.sign(identity, others, days), replace=True)
    print(f"renewed: {', '.join(wanted)}" if wanted else f"nothing in {folder} ends within {_RENEW_DAYS} days")


def revoke(
    folder: Folder,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Whose certificates to revoke, older ones included.")
    ] = None,
    serial: Annotated[
        list[str] | None,
        typer.Option(metavar="HEX", help="A certificate's serial number; may be given several times."),
    ] = None,
) -> None:
    """Revoke certificates: add them to the list DIR/ca.crl.

    Copy the list to every daemon, to where its tls.crl says. Daemons load it without a restart.
    A certificate that you make for the same name afterwards is valid.
    """
    authority, serials = load_authority(folder), [_serial(text) for text in serial or []]
    with alone_in(folder):
        before, known = revoked(folder), issued(folder)
        for name in names or []:
            found = [certificate.serial_number for certificate in known if _belongs(certificate, name)]
            if not found:
                raise Failure(
                    f"{folder} has no certificate of {name!r} that is still valid: see `flctl certs show {folder}`"
                )
            serials += found
        if not serials:
            raise Failure("say whose certificates to revoke, or give --serial", Exit.USAGE)
        replace_file(folder / CRL, authority.revoke(serials, before))
    new = len({*serials} - before.keys())
    print(f"revoked {counted(new, 'certificate')}: copy {folder / CRL} to where the daemons' tls.crl says")


def show(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A folder of certificates, or one certificate.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the owners, hosts and validity of certificates."""
    rows = _rows(path)
    if output is Output.JSON:
        return print_json({"certificates": rows})
    table = [
        (
            row["name"],
            row["identity"] or "-",
            ", ".join(row["hosts"]) or "-",
            row["expires_at"],
            "revoked" if row["revoked"] else str(row["days_left"]),
        )
        for row in rows
    ]
    print_table(str(path), ("name", "identity", "hosts", "expires", "days left>"), table)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the facts of every certificate at the path.

    The one that expires first comes first.
    """
    files: Sequence[Path] = sorted(path.glob("*.crt")) if path.is_dir() else [path]
    if not files:
        raise Failure(f"there is no certificate (.crt) in {path}")
    ended = revoked(path if path.is_dir() else path.parent)
    return sorted((_row(file, _load(file), ended) for file in files), key=lambda row: str(row["expires_at"]))


def _row(file: Path, certificate: x509.Certificate, ended: Mapping[int, datetime]) -> dict[str, Any]:
    names, ends = names_of(certificate), certificate.not_valid_after_utc
    identity = identity_of(certificate)
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return {
        "name": file.stem,
        "file": str(file),
        "identity": str(identity) if identity else "",
        "hosts": [*names.get_values_for_type(x509.DNSName), *addresses],
        "expires_at": ends.isoformat(),
        "days_left": (ends - datetime.now(UTC)).days,
        "serial": f"{certificate.serial_number:x}",
        "revoked": certificate.serial_number in ended,
    }


def _belongs(certificate: x509.Certificate, name: str) -> bool:
    """Return whether a certificate names this identity, and has not ended."""
    identity = identity_of(certificate)
    return identity is not None and identity.name == name and certificate.not_valid_after_utc > datetime.now(UTC)


def _serial(text: str) -> int:
    try:
        serial = int(text, 16)
        if not 0 < serial < 1 << _SERIAL_BITS:
            raise ValueError("no certificate has it")
        return serial
    except ValueError as error:
        raise Failure(
            f"{text[:60]!r} is no serial number: `flctl certs show --output json` has them", Exit.USAGE
        ) from error


def _load(path: Path) -> x509.Certificate:
    try:
        return load_authorities(path)[0]
    except ConfigError as error:
        raise Failure(str(error), Exit.CONFIG) from error
