"""The tokens that each rank holds, and what of a block of scores is visible: arithmetic on ints."""
