"""Notifications of a run: which events are sent to the receivers of the section ``notify``, and how.

``notices`` decides (pure functions over events), ``delivery`` sends one notification, ``notifier`` keeps what was sent
in a file of the run directory, so that no attempt sends it again.
"""
