"""The workers of one group, in a data-parallel or pipeline round.

`machine` is the pure state machine, `rendezvous` keeps its state and says what each worker is to do. Neither knows
rounds, sessions or gRPC. Of the server, this room imports nothing.
"""
