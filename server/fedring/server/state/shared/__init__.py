"""A state that several servers share: PostgreSQL and an object store.

One of them leads at a time, and only it uses the state.
"""
