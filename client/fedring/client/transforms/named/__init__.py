"""The client halves of the transforms that jobs name.

Jobs name them in their list `transforms`. A module here is found by itself. It defines one subclass of
`fedring.client.transforms.interface.Transform` with a `name`. See docs/algorithms.md.
"""
