"""Options of a lowering, each with its check and its form as a compile spec."""
