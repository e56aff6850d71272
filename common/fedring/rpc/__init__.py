"""What both sides of every call share: channels, errors, the boundary, chunks."""
