"""The rows of the server in an SQL database.

`tables` follow from the rows' dataclasses, and `sealed` gives each row a digest. There is a store for each concern,
over transactions that all of them share. `store` puts them together.
"""
