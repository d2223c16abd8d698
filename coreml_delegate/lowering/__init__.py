"""From a subgraph to the files of its blob: ``build._lower`` has the steps, in order."""
