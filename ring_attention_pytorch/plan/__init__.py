"""Plans: all decisions of a call, made and agreed by all ranks before it starts."""
