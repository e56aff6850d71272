"""A client as one worker of a group.

It meets the others through the server and trains with them, and one of them delivers the model. What may enter: a task
whose job is data-parallel or a pipeline, and the loaded model, data and functions of the job. What must not: the epochs
themselves, which `fedring.workers` trains on any process group and without a server, and the ways of a federated round,
which needs no group.
"""
