"""The measurements that need a GPU, in pieces with time limits: ``python -m gpu``, or ``make gpu``."""
