"""Byte formats (blob, mlpackage, weight file), the files inside a blob, and atomic writing."""
