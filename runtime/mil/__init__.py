"""Readers of MIL programs: protobuf, mlpackage and weight file into frozen records."""
