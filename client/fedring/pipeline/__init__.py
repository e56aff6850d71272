"""Models cut into stages, and micro-batches that flow through them, in one process or over torch.distributed.

drawing                          schedules (fedring.schedules) as text and as a picture
cut                              a model becomes stages
stage, stash                     forwards and backwards of one stage, with the weights of their time
transport, worker                stages exchange messages, and a worker runs its part of a schedule
search                           the best number of micro-batches
optimizer, owners                one step of parameters with many owners
"""
