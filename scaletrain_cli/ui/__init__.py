"""What people see: the only room that uses rich. Shows what it is given and decides nothing.

The answer goes to stdout, the talk to stderr. Where nobody watches (a pipe, a file, a log) there are no colours, no
moving parts and no wrapped lines.
"""
