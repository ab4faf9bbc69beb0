"""The loop: requests in, token deltas out."""

import os

# torch's OpenMP threads spin while they wait for each other. On a machine whose cores others use too, two of them can be
# 50 times slower than one; waiting passively costs next to nothing. Read when torch is first imported, so it is set here.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
