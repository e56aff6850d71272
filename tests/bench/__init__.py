"""Benchmarks of fedring, one module each: `python -m tests.bench.NAME --help` says what it measures.

`federated`, `data_parallel`, `hooks`, `ddp` and `pipeline` repeat published experiments: each prints tables, and writes
a JSON file and a PNG, from which `experiments` writes the tables of `docs/experiments.md`. `heart`, `niid` and
`agreement` set our figures beside those of other projects there; `make outsiders` brings what they need.
The others print JSON lines, and `docs/performance.md` shows their results. `ddp_steps`, `hook_trainings` and
`pipeline_steps` are what the ranks of a benchmark run. What several of them share is in `tests.bench.lab`.
"""
