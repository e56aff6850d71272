"""The demands of a site on jobs, and the account and the secrets behind them.

Of the client, it imports nothing.
"""
