"""What malicious clients send: the attacks of the papers, for tests and measurements of robust rules.

`formulas` has what each attack computes, as pure functions. `clients` has the clients that send it over the wire.
"""
