"""Subgraphs to Core ML models by coremltools: trials, rewrites, conversion, caches."""
