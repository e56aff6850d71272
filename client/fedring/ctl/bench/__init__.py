"""Verbs that try and measure something on this machine: demo, bench, evaluate and pipeline.

`runner` starts daemons, runs jobs and takes turns, for the verbs here and for `tests/bench`. `experiment` is one job on
daemons of its own; `presets` has the job that suits each data set. Nothing here changes a server that somebody else
uses.
"""
