"""The server halves of transforms, one module for each feature of jobs.

`fedring.server.model.transforms.listing` builds the list of a job's transforms, and nothing else decides by a feature.
A module here holds one feature, which a key of the job asks for; `named` holds those that a job names in its list
`transforms`. A transform may use all of `fedring.server.model` but `making`, which calls it. It knows nothing of rounds
in progress, sessions or gRPC calls.
"""
