"""Verdicts on calls: whether Core ML takes a call, and whether the CPU runs an undelegated call."""
