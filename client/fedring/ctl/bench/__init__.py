"""Verbs that measure on this machine: demo, bench, evaluate and pipeline.

`runner` starts daemons, runs jobs and takes turns. `experiment` is one job on daemons of its own; `presets` has the job
that suits each data set. `ranks` starts a process for each rank of a measurement, on the hosts of `networks`; `rank` is
what runs there. `parts` shows the progress of a bench, and `charts` draws its results. The scripts in `tests/bench` use
the same modules.

A verb's module has its options, its tables and its plot, and does not import torch. What its ranks do is in a module of
its own: `hook_steps` and `hook_trainings` for `hooks`, `ddp_steps` for `ddp`, `pipeline_steps` for `pipeline`. Nothing
here changes a server that somebody else uses.
"""
