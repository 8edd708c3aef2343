"""Limits of a constraint, before it is compiled and meanwhile.

A constraint comes from a client. Each number here is checked before the work that it bounds is done.
"""

MAX_BYTES = 65_536  # of a pattern or a schema, as UTF-8
MAX_STRUCTURE_BYTES = 262_144  # of a structure: the schemas of all tools are in it
MAX_NESTING = 32  # groups inside groups
MAX_REPEAT = 1_000  # of one counted repetition: {m,n}
MAX_REPEAT_PRODUCT = 10_000  # of counted repetitions inside each other
MAX_STATES = 50_000  # of an automaton
MAX_WORK = 2_000_000  # moves looked at while one automaton is made deterministic: seconds
MAX_CELLS = 8_000_000  # of an automaton's table: states times classes of bytes, 4 bytes each
MAX_CHOICES = 2_000
