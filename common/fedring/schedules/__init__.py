"""Pipeline schedules as plain data, and their cost.

A schedule says which worker computes which micro-batch, and when. Both daemons read schedules: the server simulates a
job's schedule before it takes the job, and workers follow it. The package holds schedules and their simulation. It uses
the standard library only: torch and gRPC must not enter, and it may import no other package of fedring.
`fedring.pipeline` executes schedules.
"""
