"""The texts of the trackers (``scaletrain_cli.tracking``)."""

from scaletrain_cli.reasons import Texts

TEXTS: Texts = {
    "not-installed": "the tracker {tracker} is not installed in the training environment: {message}; training "
    "continues without it",
    "start-failed": "the tracker {tracker} could not start: {message}; training continues, and it is tried again",
    "log-failed": "the tracker {tracker} failed: {message}; training continues, and it is tried again",
    "queue-full": "the tracker {tracker} is turned off for this attempt, because {lines:whole} lines wait for it; the "
    "next attempt logs what is missing",
    "finish-timeout": "the tracker {tracker} did not finish in time; the next attempt of the run logs what is missing",
    "on": "the tracker {tracker} works again",
}
