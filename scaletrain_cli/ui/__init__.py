"""The screens: the only package that uses rich. Prints what it is given and makes no decisions.

Results go to stdout, everything else to stderr. Where the stream is not a terminal (a pipe, a file, a log) there are no
colors, no moving parts and no wrapped lines.
"""
