"""The gRPC services that clients call: thin shells around rounds, updates, models and groups.

A service reads messages, keeps their deadlines, and hands over what they say. It decides nothing.
"""
