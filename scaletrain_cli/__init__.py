"""ScaleTrain: one run spec is planned, submitted, trained, preempted and resumed."""

__version__ = "0.2.0"
