"""What operators see and do: the control service, tokens, the page's facts, metrics, and readiness.

It reads rounds, models and state. Of the rooms below `main`, only `guard` imports it, for the tokens.
"""
