"""Bytes to values and back: no I/O, no clock, no gRPC.

`encode` turns a flat vector into one of the payload formats of protos/FORMATS.md,
`open_payload` reads one range by range, `decode` reads one whole. Readers trust
no byte: they raise CodecError and nothing else, and allocate by what the receiver
expects, never by what the bytes claim.
"""
