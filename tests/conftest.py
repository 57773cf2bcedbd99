"""For all tests: which examples Hypothesis tries, and that Ctrl-C does something.

The same ones on every run, so that a change is judged by what it changed; `--hypothesis-profile random` looks for new
ones. None has a time limit of its own, for machines are shared.

What a shell starts in the background ignores Ctrl-C, and so do its children: tests that send one would wait in vain.
"""

import signal

from hypothesis import settings

settings.register_profile("random", deadline=None)
settings.register_profile("tidegate", deadline=None, derandomize=True)
settings.load_profile("tidegate")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
