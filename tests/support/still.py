"""The first import of fork servers: they collect no garbage, and forks look at nothing they have.

A collection reads all objects of all that is imported, and writes in each: a fork then has to copy
that page.
"""

import gc
import os

gc.disable()
os.register_at_fork(before=gc.freeze, after_in_child=gc.enable)
