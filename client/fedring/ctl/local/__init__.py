"""Verbs that work on this machine: try, simulate, evaluate, profile and pipeline.

`runner` starts daemons, runs jobs and presents results. `experiment` is one job on daemons of its own; `presets` has
the job that suits each data set. `ranks` starts a process for each rank of a measurement; `rank` is what runs there,
and `hook_steps` what `profile` measures there. `charts` draws results. The benchmarks in `tests/bench` use the same
modules.

A verb's module has its options, its tables and its plot, and does not import torch. Nothing here changes a server that
somebody else uses.
"""
