"""MIL programs, whatever they are made from."""
