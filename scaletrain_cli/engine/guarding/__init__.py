"""What watches a run's numbers and says when it goes wrong; and the way back. Only the way back knows the run."""
