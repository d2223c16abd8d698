"""Lowering of subgraphs to blobs: one at a time, or those of several methods together."""
