"""A rank of a measurement as a program, which can be forked."""

from fedring.ctl.local.rank import main

if __name__ == "__main__":
    main()
