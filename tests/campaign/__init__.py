"""Random jobs under random harms, and the promises checked from outside: `python -m tests.campaign`."""
