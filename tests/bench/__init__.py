"""Benchmarks of fedring, one module each: `python -m tests.bench.NAME --help` says what it measures.

They print JSON lines. `docs/performance.md` shows their results. What they share with `flctl bench` (daemons, jobs,
turns, ranks, networks) is in `fedring.ctl.bench`; `daemons` here holds what only these scripts need.
"""
