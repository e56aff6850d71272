"""A small read-only page for browsers, and the JSON behind it.

docs/web.md describes both.

It knows HTTP, and nothing of rounds. It may import `fedring.daemon`.

app          what is served at which path
feed         what has changed, as server-sent events
files        the page and its scripts, compressed once
headers      what every response says to the browser
serve        the listener
static       the page itself
"""
