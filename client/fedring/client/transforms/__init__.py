"""What jobs do to updates at the client: one module for each algorithm, and the list that is built from a job.

`interface` says what a transform may do; `chosen` makes the list. No I/O: what a transform begins with is handed in.
This room may import `transfer`, for updates and what they leave, and nothing else of the client.
"""
