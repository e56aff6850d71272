"""Runs a daemon that finds modules in further folders, too.

    python -P -m fedring.ctl.with_code FOLDERS fedring.client.main key=value ...

The folders come last: nothing in them takes the place of Python's own modules, or of installed ones. PYTHONPATH would
put them first, and so would the current folder without -P.
"""

import os
import runpy
import sys

MODULE = "fedring.ctl.with_code"
"""The name of this module, for the command line of a daemon."""


def main() -> None:
    """Run the module of the second argument, with the arguments after it."""
    _, folders, module, *rest = sys.argv
    sys.path += [folder for folder in folders.split(os.pathsep) if folder not in sys.path]
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
