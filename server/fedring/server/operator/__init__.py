"""What operators see and do: the control service, tokens, the page's facts, metrics, and readiness.

It reads rounds, models and state. Nothing in the other packages imports it.
"""
