"""Whether what a run spec names outside itself is there: data, weights, tokenizers, code, credentials."""
