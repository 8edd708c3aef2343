"""Random schemas against jsonschema: what is served is valid, and something can be written.

    python benchmarks/random_schemas.py [--schemas 5000] [--seed 0] [--seconds 400] [--show 5]

`tests/actors/grammar/random_schemas.py` says what is tried. Its counts:

    invalid written, invalid accepted   there must be none. A text with doubled names is invalid if what
                                        parsers make of it (the last one counts) is
    nothing written                     served schemas of which no output ended, though outputs were led
                                        to an end: there must be none
    doubled names                       outputs that have some, where that makes nothing invalid
    valid accepted                      of valid instances; the rest is left out, or in another order
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.actors.grammar.random_schemas import FAULTS, SchemaCampaign


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--schemas", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schema")
    parser.add_argument("--seconds", type=float, default=380.0, help="begin no schema behind these")
    parser.add_argument("--show", type=int, default=3, help="examples of each fault")
    given = parser.parse_args()
    campaign = SchemaCampaign(given.show)
    until = time.monotonic() + given.seconds
    seed = given.seed
    for seed in itertools.takewhile(
        lambda _: time.monotonic() < until, range(given.seed, given.seed + given.schemas)
    ):
        campaign.one(seed)
    for name, count in sorted(campaign.counts.items()):
        print(f"{name:28} {count}")
    print(f"{'last seed':28} {seed}")
    return int(any(campaign.counts[kind] for kind in FAULTS))


if __name__ == "__main__":
    sys.exit(main())
