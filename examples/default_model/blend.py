"""Go part of the way from old weights to new ones, which keeps more of what the old ones could.

Weights of one training line can be averaged (Wortsman et al. 2022, "Robust fine-tuning of zero-shot
models"). Does not know how weights are trained.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import model as models


def blend(old: Path, new: Path, out: Path, share: float) -> None:
    """Write weights that lie between two folders'; `share`: of the new ones, whose context they get."""
    model = models.load_folder(new)
    before, after = models.load_folder(old).state_dict(), model.state_dict()
    model.load_state_dict({name: before[name].lerp(after[name], share) for name in before})
    models.save_folder(model, new, out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("old", "new", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--share", type=float, required=True, help="of the new weights, from 0 to 1")
    args = parser.parse_args()
    blend(args.old, args.new, args.out, args.share)


if __name__ == "__main__":
    main()
