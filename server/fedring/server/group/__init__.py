"""The workers of one group, who train together in a data-parallel or a pipeline round.

`machine` is the pure state machine, `rendezvous` keeps its state and says what each worker is to do. Neither knows
rounds, sessions or gRPC. Of the server, this room imports nothing.
"""
