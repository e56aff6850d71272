"""Thin gRPC services for clients, around rounds, updates, models and groups.

A service reads messages, keeps their deadlines, and hands over what they say. It decides nothing.
Of the server, this room imports `aggregation`, `config`, `group`, `model`, `round`, `running`, `sessions`, `state`
and `update`.
"""
