"""Translations of MIL ops to OpenVINO, a module per family: those of the reference kernels."""
