"""The suites interpreted_*.py run in processes of their own, in which Triton interprets."""

import os

from tests.support.interpreter import speed_up

if os.environ.get("TRITON_INTERPRET") == "1":
    speed_up()
