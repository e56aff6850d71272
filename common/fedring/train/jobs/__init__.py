"""The schema of a job.

It holds the keys of a job, its tables, and their demands of each other. It does not import torch.
"""
