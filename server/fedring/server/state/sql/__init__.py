"""The rows of the server in an SQL database.

`tables` follow from the rows' dataclasses, `sealed` gives each row a digest, and `store` is the store over them.
"""
