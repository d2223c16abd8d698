"""From a subgraph to a Core ML model by coremltools: tried, prepared, converted, kept."""
