"""What a daemon needs whatever it does: configuration, logs, exit codes, systemd."""
