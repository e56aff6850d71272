"""The client halves of update transforms, and their list for a job.

There is one module for each algorithm. `interface` says what a transform may do; `chosen` makes the list. No I/O: what
a transform begins with is handed in. This room may import `transfer`, for updates and what they leave, and nothing else
of the client.
"""
