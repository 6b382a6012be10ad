"""How torch's threads wait in all tests, and in the processes that tests start."""

import os

# Where two test processes share two cores, threads of torch that spin until there is work take from the other process
# more time than the work itself. They are as many as ever, and compute the same. OpenMP reads this as it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
