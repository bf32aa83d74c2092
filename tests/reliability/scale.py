"""How much the tests of reliability do: a short form, or with `OSPREY_RELIABILITY=long` the long one."""

import os

LONG = os.environ.get("OSPREY_RELIABILITY") == "long"
