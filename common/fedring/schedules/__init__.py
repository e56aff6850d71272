"""Pipeline schedules as plain data: which worker computes which micro-batch when, and what that costs.

Both daemons read schedules: the server simulates a job's schedule before it takes the job, and workers follow it. The
package holds schedules and their simulation. It uses the standard library only: torch and gRPC must not enter, and it
may import no other package of fedring. What executes a schedule is in `fedring.pipeline`.
"""
