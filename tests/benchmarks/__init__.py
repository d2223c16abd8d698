"""Latency against other ways to run the same model on the same CPU; ``make bench`` prints the tables."""
