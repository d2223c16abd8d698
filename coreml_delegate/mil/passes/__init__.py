"""Passes over MIL programs, in addition to coremltools' own passes."""
