"""Passes over MIL programs, beside those of coremltools."""
