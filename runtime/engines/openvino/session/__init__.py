"""Compiled models: compile or find them in the cache, run them, keep their states."""
