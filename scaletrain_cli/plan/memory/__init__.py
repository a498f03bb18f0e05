"""Bytes of a rank: states, activations, buffers; the probability of an OOM. Entry: device_memory.plan_memory."""
