"""What every daemon needs: configuration, logs, metrics, traces, locks, exit codes, and systemd.

The package knows no gRPC, and may import no other package of fedring.
"""
