"""Kernels of MIL ops in torch, a module per family: the families of OpenVINO's translations."""
