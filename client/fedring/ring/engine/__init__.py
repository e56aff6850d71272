"""The ring's engine."""
