"""Parts that every daemon needs.

They are configuration, logs, metrics, traces, locks, exit codes, and systemd. The package knows no gRPC, and may import
no other package of fedring.
"""
