"""The `torch.distributed` backend: process groups, works and futures over the engine, and how workers find each other.

Code belongs here if it knows `torch.distributed`: its options, its overloads, its stores. How a collective works must
not enter: a process group turns tensors into bytes, starts a program of `engine`, and hands out a work for it.
"""
