"""The kinds of models that are trained, one object per kind: language models and vision networks; see registry.py."""
