"""Checks that what a run spec names outside itself exists: data, weights, tokenizers, code, credentials."""
