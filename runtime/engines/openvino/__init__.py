"""The OpenVINO engine: the program as one compiled graph on the CPU."""
