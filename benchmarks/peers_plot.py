"""The picture in the README: trees and chats on one H200, beside SGLang and vLLM.

    python benchmarks/peers_plot.py --output docs/peers.svg

Ours are the medians in `results/`. The peers' are those of docs/log/gpu.md ("the GPU, all rows"): SGLang
0.5.11 and vLLM 0.20.2, measured on the same kind of machine and workload, not in the same run; of a
range the better end. It measures nothing.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

RESULTS = Path(__file__).parent / "results"
PEERS = ("SGLang 0.5.11, 2026-11-21", "vLLM 0.20.2, 2026-11-21")
COLOURS = ("#2b6cb0", "#a0aec0", "#cbd5e0")
# (title, file, figure, the peers' figures)
PANELS = (
    ("64 trees of thought, Llama-3.1-8B\nshape: seconds", "d-tree-llama-3.1-8b", "seconds", (6.2, 6.3)),
    ("64 trees of thought, Qwen3-0.6B\nshape: seconds", "d-tree-qwen3-0.6b", "seconds", (5.2, 4.3)),
    ("64 chats of 8 turns, Llama:\ntokens/s", "e-chat-llama-3.1-8b", "output_tok_s", (5480, 5300)),
    ("64 chats of 8 turns, Qwen:\ntokens/s", "e-chat-qwen3-0.6b", "output_tok_s", (10400, 11000)),
)


def ours(file: str, figure: str) -> tuple[float, str]:
    """The median of the only case in a report, and the day it was measured."""
    report = json.loads((RESULTS / f"{file}.json").read_text())
    (case,) = report["cases"]
    return float(case["figures"][figure]["median"]), report["time"][:10]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("docs/peers.svg"))
    options = parser.parse_args()
    plt.rcParams |= {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "peers"}
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 2.6))
    days = set()
    for axis, (title, file, name, peers) in zip(axes, PANELS, strict=True):
        value, day = ours(file, name)
        days.add(day)
        values = (value, *peers)
        bars = axis.bar(("Ramify", *PEERS), values, color=COLOURS)
        axis.bar_label(bars, [f"{value:,.0f}" if value > 100 else f"{value:.1f}" for value in values])
        better = "lower" if name == "seconds" else "higher"
        axis.set_title(f"{title} ({better} is better)", fontsize=8)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.margins(y=0.15)
        axis.spines[["top", "right", "left"]].set_visible(False)
    names = (f"Ramify, {', '.join(sorted(days))}", *PEERS)
    figure.legend(bars, names, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(options.output, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
