"""Checks of the user's own torch code, away from the server: what keeps it off the fast path.

`run` is the side of the command line. `worker` is the child process, started by the interpreter that has torch;
what is imported there needs only the standard library until a check itself imports torch.
"""
