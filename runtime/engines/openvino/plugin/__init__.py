"""Workarounds for OpenVINO 2026.4's CPU plugin, where it computes wrong values or loses NaN.

Each module describes the fault, the release in which it was last seen, and its issue, if there is
one.
"""

DEVICE = "CPU"
"""The device that models are compiled for: OpenVINO's CPU plugin."""
