"""The lab of all benchmarks: networks, groups of ranks, daemons, turns, curves, and the header of results.

What `flctl try` and `flctl profile` need, too, is in `fedring.ctl.local`: fleets, jobs, processes of ranks, bars.
"""
