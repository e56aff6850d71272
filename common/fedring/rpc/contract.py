"""What both sides of the wire contract must agree on beside the .proto files."""

import re

PROTOCOL = 2
"""The version of the protocol that this software speaks (JoinRequest.protocol)."""

SESSION_KEY = "fl-session"
"""The metadata key that names the session in every call but Join."""

RESUME_SECRET = re.compile(r"[0-9a-f]{32}")
"""What a resume secret looks like: 128 random bits (JoinReply.resume_secret)."""

SMALL_BYTES = 1 << 16
"""Most bytes of what travels in one message with its header: a SmallModel, the payload of a SmallUpdate."""

MAX_HEADER_BYTES = 1 << 16
"""Most bytes of an update's header."""

MAX_FIGURE = 1e200
"""The largest magnitude of a metric, or of a sum of losses: beyond it a sum over clients could leave float64."""
