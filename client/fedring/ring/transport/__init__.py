"""The ring's transport."""
