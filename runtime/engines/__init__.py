"""Engines that execute MIL programs."""
