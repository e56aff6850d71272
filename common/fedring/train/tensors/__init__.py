"""Models as tensors.

It holds their schema, their flat vectors, their shared and frozen parts, and their files. `download` makes a model of
the messages in which a server sends it.
"""
