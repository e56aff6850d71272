"""Pipeline schedules as plain data: who computes which micro-batch when, and what that costs.

Both daemons read them: the server tries a job's schedule out before it takes the job, and workers follow it. Nothing
here imports torch, gRPC, or any other package of fedring.
"""
