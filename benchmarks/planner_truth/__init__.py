"""Measurements that others published, as run specs with the layout they had, and scores of what is predicted.

One module per table says which columns describe the run and which were measured. Only the first reach the planner.
"""
