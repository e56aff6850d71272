"""What both ends of every gRPC call share: channels, TLS, identities, errors, chunks, and the interceptors of servers.

What may enter: bytes, messages of the protocol, and settings of a daemon. What must not: rounds, jobs, models and
anything else that a call is about. A server's interceptors go in this order: `CountCalls` counts what the caller sees,
`Boundary` turns exceptions into statuses; what fl-server adds (who may call, spans) comes after them. The package may
import `fedring.codec` and `fedring.daemon`.
"""
