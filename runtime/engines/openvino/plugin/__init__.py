"""What OpenVINO 2026.4's CPU plugin computes otherwise than meant, and how that is avoided."""

DEVICE = "CPU"
"""What OpenVINO runs on: its CPU plugin."""
