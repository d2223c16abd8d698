"""The reference engine: torch, op by op, at the dtypes of the program."""
