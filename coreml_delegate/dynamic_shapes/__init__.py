"""Sizes that are known at run time only: enumerated, in ranges, or related to each other."""
