"""Fuzzing of every decoder of bytes from a peer or a disk: `python -m tests.fuzz`."""
