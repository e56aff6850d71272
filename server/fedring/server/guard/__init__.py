"""Who may call fl-server: identities from certificates and tokens, roles, refusals, and the audit log.

Every call passes here before it reaches a service. Nothing here knows what a call does. Of the server, this room
imports `config`, `sessions` and `state`.
"""
