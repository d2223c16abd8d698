"""Workarounds for OpenVINO 2026.4's CPU plugin, where it computes wrongly or loses NaN.

Each module says what the plugin does, in which release that was last seen, and the issue where it
is reported, if it is.
"""

DEVICE = "CPU"
"""The device that models are compiled for: OpenVINO's CPU plugin."""
