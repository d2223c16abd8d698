"""Functions of MIL variables that MIL has no op for."""
