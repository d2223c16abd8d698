"""Verdicts on calls: whether Core ML takes one, and whether the CPU runs one that stays there."""
