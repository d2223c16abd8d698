"""Parts of MIL programs that every way into Core ML shares."""
