"""Secure aggregation: the server learns only the sum of updates.

The sum is that of a group of clients. Nothing else of their updates is learned. The protocol is that of Bonawitz et al.
(2017), with the complete graph and against an active server, among at most 100 clients a group. `roster` is a checked
group, with the statements that its members sign, `keys` derives every secret from a client's own, and hides shares from
the server, `shamir` makes them, `masks` hides the values, and `levels` makes integers of an update.

The package is pure: it reads no file and no clock, and sends nothing. It may import `fedring.codec` and
`fedring.signatures`. FORMATS.md, "Secure aggregation", describes all bytes. Clients run the protocol in
`fedring.client.secure`, the server in `fedring.server.secure`.
"""


class SecureError(Exception):
    """A side stops taking part in a round's secure aggregation.

    Args:
        reason: a stable word.
        text: one sentence for people.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason
