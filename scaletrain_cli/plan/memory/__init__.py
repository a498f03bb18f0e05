"""Bytes of a rank: states, activations, buffers, and the probability of running out. Entry: device_memory.plan_memory."""
