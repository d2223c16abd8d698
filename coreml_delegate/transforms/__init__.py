"""Program to program, before a program is partitioned; what it computes does not change."""
