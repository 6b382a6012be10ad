"""What the user can get wrong, as exceptions whose text is one line: what, where, how to mend."""


class SocflowerError(Exception):
    """Base of every error a user can mend; the command line prints its text and exits with status 2.

    That is the status of mistakes, which show before anything is trained; training that failed has status 1.
    """


class ConfigError(SocflowerError):
    """A value in a file, argument or option that cannot be; the text names key, value and remedy."""


class InfeasiblePlan(SocflowerError):
    """A request the cluster cannot meet, such as more groups than SoCs; the text has both numbers."""


class DataUnavailable(SocflowerError):
    """A data set that is neither in the named folder nor reachable; the text says where it was sought."""


class TrainingFailed(SocflowerError):
    """No usable reply was left to aggregate; the text carries the first cause and the node it came from.

    The command line exits with status 1.
    """
