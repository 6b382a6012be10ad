"""What all tests take for granted, and the processes that they start: waiting threads, signals, and what is drawn."""

import os
import signal
import threading

from hypothesis import HealthCheck, settings

from tests.command_line import socflower  # noqa: F401 - a fixture

# Where two test processes share two cores, threads of torch that spin until there is work take from the other process
# more time than the work itself. They are as many as ever, and compute the same. OpenMP reads this as it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Where tests run behind nohup, or as a job of a shell without job control, these are ignored, and every process that a
# test starts would inherit that.
if threading.current_thread() is threading.main_thread():
    for _number, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL),
                              (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(_number) is signal.SIG_IGN:
            signal.signal(_number, _default)

# A loaded machine must not fail a property: no deadline for an example, and slow drawing is no fault of a strategy.
# Examples are the same in every run, so that a change fails by its own fault and anybody can see the failure again.
# Other examples are looked for where a failure surprises nobody: `make test-random` takes "exploring", with a seed.
_common = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("reproducible", _common, derandomize=True)
settings.register_profile("exploring", _common)
settings.load_profile("reproducible")
