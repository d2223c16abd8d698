"""Fuzzing of what reads and runs MIL programs: ``make fuzz``, and a corpus the tests replay."""
