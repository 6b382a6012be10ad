"""Exceptions for user errors; each text is one line that names the error, its place and the remedy."""


class SocflowerError(Exception):
    """Base of all errors that a user can fix; the command line prints the text and exits with status 2.

    Status 2 is for mistakes found before training starts; failed training has status 1.
    """


class ConfigError(SocflowerError):
    """An invalid value in a file, argument or option; the text names key, value and remedy."""


class InfeasiblePlan(SocflowerError):
    """A request the cluster cannot meet, such as more groups than SoCs; the text has both numbers."""


class DataUnavailable(SocflowerError):
    """A data set that is neither in the named folder nor reachable; the text lists the places searched."""


class TrainingFailed(SocflowerError):
    """No usable reply remained to aggregate; the text has the first cause and its node.

    The command line exits with status 1.
    """
