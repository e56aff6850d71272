"""Privacy policies of sites: demands, accounts and secrets.

Of the client, it imports nothing.
"""
