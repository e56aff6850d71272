"""Runs a program that may open few files and connections: `python -m tests.few_files 256 MODULE ARGUMENTS`."""

import resource
import runpy
import sys

if __name__ == "__main__":
    _, most, module, *arguments = sys.argv
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(most), int(most)))
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)  # as a program, it is `__main__`
    runpy.run_module(module, run_name="__main__", alter_sys=True)
