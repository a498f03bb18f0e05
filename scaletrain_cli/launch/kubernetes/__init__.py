"""Kubernetes: what is sent, what the API server says of it, and what runs in the pods."""
