"""Batches of images: decoding, random changes of each image, mixing, and captions."""
