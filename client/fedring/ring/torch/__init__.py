"""The ring's torch."""
