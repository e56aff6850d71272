"""Models as tensors: schema and vectors, shared and frozen parts, files."""
