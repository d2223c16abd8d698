"""The operations of a graph, by family: each a method of the builder, with its record."""
