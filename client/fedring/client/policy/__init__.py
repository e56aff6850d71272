"""Privacy policies of sites: demands, accounts, keys and secrets.

Of the client, it imports nothing.
"""
