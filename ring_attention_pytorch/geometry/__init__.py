"""The tokens that each rank holds, and the visible scores of a block: arithmetic on ints."""
