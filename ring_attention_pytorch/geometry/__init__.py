"""Who holds which tokens, and what of a block of scores is visible: arithmetic on ints."""
