"""How ranks coordinate: rings, agreement, matching steps, failures and their reports."""
