"""What is trained, one object per kind: transformers of text, and vision networks. registry.py finds them by model."""
