"""Plans: what a call does, decided and agreed by all ranks before it starts."""
