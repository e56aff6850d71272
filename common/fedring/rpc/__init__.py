"""The common parts of both ends of every gRPC call.

They are channels, TLS, identities, errors, chunks, and the interceptors of servers. Bytes, messages of the protocol,
and settings of a daemon may enter. Rounds, jobs, models and other subjects of calls must not. A server's interceptors
go in this order: `CountCalls` counts the statuses that callers see, and `Boundary` turns exceptions into statuses;
those that fl-server adds (access, spans) come after them. The package may import `fedring.codec` and `fedring.daemon`.
"""

import os

# Before grpc is imported: with it, forks such as workers of a DataLoader may crash. So packages that import grpc import
# this one first.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
