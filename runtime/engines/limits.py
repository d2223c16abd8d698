"""What no program needs more of: beyond it one is taken for damaged or endless."""

MAX_TURNS = 1 << 20
"""Turns of a loop; on the reference engine, of all loops of one call."""

MAX_LIST = 1 << 20
"""Elements of one list, and of a tensor where Python values are needed: neither is for data."""
