"""The `torch.distributed` backend over the engine, and the rendezvous of workers.

Code belongs here if it knows `torch.distributed`: its options, its overloads, its stores. How a collective works must
not enter: a process group turns tensors into bytes, starts a program of `engine`, and hands out a work for it.
"""
