"""Seconds of a step: kernels, blocks, stages, pipeline, communication, host work. Entry: step_time.plan_time."""
