"""What ranks say to one another: rings, agreement, steps that match, failures and their reports."""
