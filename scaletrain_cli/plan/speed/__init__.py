"""How long a step takes: kernels, links, pipelines, and how frameworks spend their time."""
