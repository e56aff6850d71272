"""What operators see and do: the control service, the page's facts, metrics, and readiness.

It may import every room but `guard`, of which it only knows the metrics, and nothing in those rooms imports it.
"""
