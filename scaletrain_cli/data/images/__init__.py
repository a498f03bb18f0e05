"""Images of a source, with their labels and captions, and decoding."""
