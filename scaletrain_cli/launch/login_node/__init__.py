"""Verbs that run on the login node of a cluster, over ssh: for a laptop that the cluster's scheduler does not serve."""
