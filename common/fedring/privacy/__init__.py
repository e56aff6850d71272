"""Differential privacy: what noise is added, and how much privacy is spent."""
