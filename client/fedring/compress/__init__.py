"""Lossy compression of tensors and arrays, with laws of conservation.

Here live error feedback for updates (`feedback`) and for means over workers (`correction`), deep gradient compression
(`dgc`, `dgc_select`) and low-rank approximation (`lowrank`). What enters is a function of its arguments, with the
section of the paper at its formula, and a test of its law. Process groups, hooks, I/O, and the layout of bytes must not
enter: hooks are in `fedring.ddp`, formats in `fedring.codec`. The package may import `fedring.codec` and, for
the bounds of settings, `fedring.train`.
"""
