"""Checks on a running job: loss guard and rollback, stragglers, and the preflight of devices and links."""
