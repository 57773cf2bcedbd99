"""For all tests: which examples Hypothesis tries, and that Ctrl-C does something.

What a shell starts in the background ignores Ctrl-C, and so do its children: tests that send one would wait in vain.
"""

import signal

from tests.examples import register_profiles

register_profiles()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
