"""How torch's threads wait and how Hypothesis draws in all tests, and in the processes that tests start."""

import os

from hypothesis import HealthCheck, settings

# Where two test processes share two cores, threads of torch that spin until there is work take from the other process
# more time than the work itself. They are as many as ever, and compute the same. OpenMP reads this as it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A loaded machine must not fail a property: no deadline for an example, and slow drawing is no fault of a strategy.
# Examples are the same in every run, so that a change fails by its own fault and anybody can see the failure again.
# Other examples are looked for where a failure surprises nobody: `make test-random` takes "exploring", with a seed.
_common = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("reproducible", _common, derandomize=True)
settings.register_profile("exploring", _common)
settings.load_profile("reproducible")
