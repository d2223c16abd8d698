"""From a tagged subgraph to the bytes of a blob."""
