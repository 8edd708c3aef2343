"""Limits of a schema. Each number is checked before the work that it bounds is done."""

MAX_DEPTH = 64  # JSON inside JSON, of the schema as text
MAX_VALUES = 2_000  # of one enum
MAX_NUMBER_DIGITS = 40  # of a number in the schema
MAX_CASES = 256  # shapes that one schema may be a union of
MAX_CLAIMS = 20_000  # different conjunctions of schemas that are looked at
MAX_EXPRESSIONS = 20_000  # values and members that are spelled
MAX_NESTING = 48  # of spelled values in each other
MAX_COUNT = 1_000  # of minLength, maxLength, minItems, maxItems
MAX_MULTIPLE = 2_000  # of multipleOf, in its last digit
ANY_DEPTHS = (3, 1)  # how deep a value may nest that no schema describes: the first that fits
MAX_SECONDS = 4.0  # of the processor, for one schema; another back end may then be tried in time
MAX_NOTES = 64  # what is told of one schema
MAX_PLACES = 1_000  # where values are checked while they are written
