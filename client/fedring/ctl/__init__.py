"""flctl, the operator's command line.

Here live `main`, which lists the verbs, and what all verbs share: options, output, and daemons as child processes. The
calls of the control port, and failures, are in `fedring.control`. The verbs are in three packages: `operate` has those
that call a running fl-server, `admin` those that work on the files of a host, and `local` those that try and measure
something on this machine.

A module may import those here and those of its own package; `admin` and `local` may also import `operate`. flctl may
import every other package of fedring, and none of them imports flctl. torch and matplotlib take seconds to import, so
only the verbs that need them may import them, inside a function.
"""
