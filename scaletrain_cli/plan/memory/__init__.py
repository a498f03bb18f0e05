"""What a rank keeps: states, activations, buffers, and the chance that they do not fit."""
