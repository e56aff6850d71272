"""Algorithms that jobs name in their list `transforms`.

A module here is found without being named anywhere else. It defines one subclass of
`fedring.server.model.transforms.transform.Algorithm` with a `name`. See docs/algorithms.md.
"""
