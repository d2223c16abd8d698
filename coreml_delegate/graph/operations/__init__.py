"""Operations of the graph builder by family: methods with their records and MIL composition."""
