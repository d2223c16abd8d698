"""Latency against other ways to run a model on the same CPU; ``make bench`` prints the tables."""
