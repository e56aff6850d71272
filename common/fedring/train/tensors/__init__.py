"""Models as tensors.

It holds their schema, their flat vectors, their shared and frozen parts, and their files.
"""
