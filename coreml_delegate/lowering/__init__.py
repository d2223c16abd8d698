"""From a subgraph to the files of its blob: ``build.build_files`` has the steps, in order."""
