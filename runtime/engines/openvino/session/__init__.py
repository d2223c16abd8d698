"""Compiled models: made or found in the cache, run, and their states between calls."""
