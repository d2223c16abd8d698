"""Groups the accepted calls of a program into tagged partitions."""
