"""The operators' view and verbs: control service, page, metrics, and readiness.

No other room imports it.
Of the server, this room imports `aggregation`, `config`, `group`, `guard`, `jobs`, `model`, `round`, `running`,
`service`, `sessions`, `state` and `update`.
"""
