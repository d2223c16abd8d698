"""Bytes: the blob, the mlpackage in it, their metadata and weights, and files written whole."""
