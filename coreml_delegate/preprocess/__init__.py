"""Lowering of subgraphs to blobs: one at a time, or the subgraphs of several methods together."""
