"""Constants of the protocol that the .proto files cannot hold.

Both sides must agree on them.
"""

import re

PROTOCOL = 3
"""The version of the protocol that this software speaks (JoinRequest.protocol)."""

SESSION_KEY = "fl-session"
"""The metadata key that carries the session's id in every call except Join."""

TERM_KEY = "fl-term"
"""The metadata key with which a server that shares its state begins each answer: its term, a slash, the run's id."""

RESUME_SECRET = re.compile(r"[0-9a-f]{32}")
"""The form of a resume secret: 128 random bits in hexadecimal (JoinReply.resume_secret)."""

SMALL_BYTES = 1 << 16
"""The largest payload that travels in one message together with its header: in a SmallModel or a SmallUpdate."""

MAX_HEADER_BYTES = 1 << 16
"""The largest header of an update, in bytes."""

MAX_FIGURE = 1e200
"""The largest magnitude of a metric or of a sum of losses. Sums of larger ones over clients could overflow float64."""
