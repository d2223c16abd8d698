"""What Core ML can take: one record per ATen op."""
