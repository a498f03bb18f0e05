"""The report of runs: its figures as JSON values, read from run directories, and one HTML page of them."""
