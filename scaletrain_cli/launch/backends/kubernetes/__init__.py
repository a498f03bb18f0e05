"""The Kubernetes back end: rendered objects, what the API server reports, and the agent in the pods."""
