"""Memory of a rank: states, activations, buffers, and the probability that they do not fit."""
