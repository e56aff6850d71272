"""The commands of a job, and the signed form of it.

The server makes commands by these functions, and a client that trusts only an operator makes them again, to compare.
It does not import torch.
"""
