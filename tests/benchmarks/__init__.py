"""Latency, load time and memory of Core ML programs here, beside other ways to run the model.

``python -m tests.benchmarks`` prints the tables; docs/benchmarks.md has those of a full run.
"""
