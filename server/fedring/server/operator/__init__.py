"""What operators see and do: the control service, the page's facts, metrics, and readiness.

No other room imports it. Of the server, this room imports `config`, `group`, `guard`, `jobs`, `model`, `round`,
`secure`, `service`, `sessions`, `state` and `update`.
"""
