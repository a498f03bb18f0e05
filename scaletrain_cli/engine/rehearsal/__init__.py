"""The process of `scaletrain rehearse`: short trials of a run on its nodes, with the parts of the training loop.

run.py is its course, trials.py trains, scores and goes back; the items are in data_items.py (labels, duplicates, first
loss, causality), step_items.py (gradients, speed, memory, data rate, restore, preemption), learning_rate.py and
overfit.py. learning_rate.py has the rule of the learning-rate range test.
"""
