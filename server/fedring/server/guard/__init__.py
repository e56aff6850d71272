"""Access to fl-server: identities, roles, refusals, and the audit log.

Identities come from certificates and tokens.

Every call passes here before it reaches a service. Nothing here knows what a call does. Of the server, this room
imports `config`, `sessions` and `state`.
"""
