"""Which layouts there are, which are legal, and which to take; for a cluster, or the cluster itself."""
