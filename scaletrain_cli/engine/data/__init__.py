"""Training data: corpora, token files, batches and prefetching."""
