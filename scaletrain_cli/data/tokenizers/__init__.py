"""Tokenizers of prepared data: what is known of one, training one, and reading one of another library."""
