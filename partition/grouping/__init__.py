"""From verdicts on calls to tagged partitions of a program."""
