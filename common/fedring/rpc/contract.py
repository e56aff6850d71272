"""What both sides of the wire contract must agree on beside the .proto files."""

PROTOCOL = 1
"""The version of the protocol that this software speaks (JoinRequest.protocol)."""

SESSION_KEY = "fl-session"
"""The metadata key that names the session in every call but Join."""
