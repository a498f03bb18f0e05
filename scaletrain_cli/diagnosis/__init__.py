"""The diagnosis of a run from its directory: findings with evidence, likely causes and changes of the spec.

history.py reads metrics.jsonl, case.py the rest; the checks are pure functions of a case, by theme: loss.py,
targets.py, learning_rate.py, gradients.py, data.py, speed.py, utilization.py, hardware.py, memory.py, durability.py.
Each module has its checks, marked by ``@check``, and their texts; checks.py runs all of them. speed.py also has the
figures of `scaletrain status`.
"""
