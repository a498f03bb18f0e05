"""Why a run waits, or why it ended: the evidence first, then what to do."""
