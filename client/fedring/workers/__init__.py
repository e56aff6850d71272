"""Training as one worker of a group: the rounds of data-parallel and of pipeline jobs.

The modules here train on any process group of torch.distributed. They know nothing of sessions or of the server:
`fedring.client` forms the group, calls them, and delivers what was trained.
"""
