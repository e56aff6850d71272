"""What every daemon needs: configuration, logs, metrics, traces, locks, exit codes, and systemd.

Nothing here knows gRPC, or imports any other package of fedring.
"""
