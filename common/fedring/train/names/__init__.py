"""Names in jobs, as "module:attribute".

It resolves names to the callables that a daemon offers, and checks their arguments.
"""
