"""Hosts of delegated ``.pte`` programs: the Python executor and the stock ExecuTorch runtime."""
