"""The screens: the only package that uses rich. Prints what it is given and makes no decisions.

Results go to stdout, everything else to stderr. If the stream is not a terminal (a pipe, a file, a log), there are no
colors, progress bars or wrapped lines.
"""
