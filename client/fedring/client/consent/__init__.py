"""Consent of a site: cards of jobs, approvals, and an audit.

Of the client, it imports nothing.
"""
