"""Published measurements as run specs with the layouts of the runs, and scores of the planner's predictions.

Each module reads one table: it names the columns that describe a run, and those that were measured. The planner gets
only the first.
"""
