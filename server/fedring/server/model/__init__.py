"""From accepted updates to the next model: rules that compute it tile by tile, model files, deltas, evaluation.

It reads and writes blobs through `fedring.server.state`. It knows nothing of rounds, sessions or gRPC.
"""
