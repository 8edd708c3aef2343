"""`ramify bench WORKLOAD`: measure a server, ours or another's, over its own protocol.

Each workload is a subcommand with sizes as flags; `plot` compares reports. This file knows flags;
`ramify.clients.bench` does the work.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ramify.clients.bench import measure, plot, report, server, workloads
from ramify.clients.bench.crowd import Crowd
from ramify.clients.bench.load_program import Target
from ramify.clients.bench.shapes import SHAPES
from ramify.clients.bench.workloads import Case
from ramify.clients.commands.screen import shown
from ramify.clients.session_link import websocket_url
from ramify.protocol.errors import BadRequest

IDS = 10_000  # prompts are made of ids below this, or below the vocabulary's size
HISTORY_ONLY = "only a Ramify server takes input ahead of its generation: --append-ahead needs --url"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("bench", help="measure a server: throughput, latency, chat, trees, ...")
    kinds = parser.add_subparsers(required=True, metavar="WORKLOAD")
    _throughput(_workload(kinds, "throughput", "many requests at once: output tokens/s"))
    _latency(_workload(kinds, "latency", "ms per decode step of steady batches; prefill tokens/s"))
    _chat(_workload(kinds, "chat", "conversations at once: tokens/s, TTFT, ITL"))
    _tree(_workload(kinds, "tree", "trees of thought at once: seconds"))
    _prefix(_workload(kinds, "prefix", "prompt tokens computed, over the fewest possible"))
    _overhead(_workload(kinds, "overhead", "one large batch: wall time over the device's time"))
    _start(_workload(kinds, "start", "from process start to ready"))
    drawing = kinds.add_parser("plot", help="compare reports of one workload in a picture")
    drawing.add_argument("reports", type=Path, nargs="+", metavar="JSON")
    drawing.add_argument("--output", type=Path, required=True, metavar="FILE", help="svg, png or pdf")
    drawing.set_defaults(run=run_plot)


# --- flags --------------------------------------------------------------------------------------


def _workload(kinds: Any, name: str, text: str) -> argparse.ArgumentParser:
    """Add a subcommand with the flags that all workloads share."""
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=text)
    engine = parser.add_argument_group("server").add_mutually_exclusive_group(required=True)
    if name != "start":
        engine.add_argument("--url", help="a Ramify server")
        engine.add_argument("--sglang", metavar="URL", help="a server with SGLang's /generate")
        engine.add_argument("--openai", metavar="URL", help="a server with /v1/completions")
        _load_flags(parser)
    engine.add_argument(
        "--serve", action="store_true", help="start `ramify serve`; its flags come after --"
    )
    parser.add_argument("serve_flags", nargs="*", metavar="-- FLAGS", help="of `ramify serve`")
    parser.add_argument(
        "--shape", choices=list(SHAPES), help="with --serve: random weights in this model's shape"
    )
    parser.add_argument("--repeats", type=_count, default=3, help="measured runs (default 3)")
    parser.add_argument("--warmup", type=_whole, default=1, help="runs before them (default 1)")
    parser.add_argument("--label", help="the server's name in tables and plots")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything, every run")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: svg, png or pdf")
    parser.set_defaults(run=run, workload=name, warm_prefix=False, append_ahead=0.0)
    return parser


def _load_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every benchmark that sends requests."""
    parser.add_argument("--model", help="the model's name in requests (--openai needs one)")
    parser.add_argument("--token", help="bearer token (default: for --url, $RAMIFY_TOKEN)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default 0)")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--ids", type=_count, metavar="N", help=f"prompt ids below N (default {IDS:,})")
    parser.add_argument("--processes", type=_count, default=1, help="of the load (default 1)")


def _throughput(parser: argparse.ArgumentParser) -> None:
    _sizes(parser, requests=256, input_min=100, input_max=1024, output_min=100, output_max=1024)
    _sizes(parser, branches=8)
    parser.set_defaults(
        cases=lambda a: [
            workloads.throughput(
                a.requests, a.input_min, a.input_max, a.output_min, a.output_max, a.branches
            )
        ]
    )


def _latency(parser: argparse.ArgumentParser) -> None:
    decode, prefill = "1x1024,8x1024,32x1024,128x1024,256x1024", "8x2048,1x2048"
    parser.add_argument(
        "--decode", type=pairs, default=pairs(decode), help=f"batch x context ({decode})"
    )
    parser.add_argument("--prefill", type=pairs, default=pairs(prefill), help=f"prompts ({prefill})")
    _sizes(parser, steps=96, branches=8)
    parser.set_defaults(
        cases=lambda a: [
            *[workloads.decode(batch, context, a.steps, a.branches) for batch, context in a.decode],
            *[workloads.prefill(prompts, length) for prompts, length in a.prefill],
        ]
    )


def _chat(parser: argparse.ArgumentParser) -> None:
    _sizes(parser, sessions=64, turns=8, input=128, output=64)
    parser.add_argument(
        "--append-ahead", type=float, default=0.0, metavar="MS", help="send input so long before"
    )
    parser.set_defaults(
        cases=lambda a: [workloads.chat(a.sessions, a.turns, a.input, a.output, a.append_ahead)]
    )


def _tree(parser: argparse.ArgumentParser) -> None:
    _sizes(parser, questions=64, prefix=512, branches=8, first=128, then=64)
    _warm(parser)
    parser.set_defaults(
        cases=lambda a: [workloads.tree(a.questions, a.prefix, a.branches, a.first, a.then)]
    )


def _prefix(parser: argparse.ArgumentParser) -> None:
    _sizes(parser, questions=64, prefix=512, branches=8, first=128, then=64, own=64, output=32)
    _warm(parser)
    parser.set_defaults(cases=_prefix_cases)


def _prefix_cases(args: argparse.Namespace) -> list[Case]:
    trees = workloads.tree(args.questions, args.prefix, args.branches, args.first, args.then)
    shared = workloads.shared_prefix(args.questions, args.prefix, args.own, args.output)
    return [Case(trees.name, trees.build, workloads.PREFIX), shared]


def _overhead(parser: argparse.ArgumentParser) -> None:
    _sizes(parser, batch=256, input=4096, output=16, branches=8)
    parser.set_defaults(cases=lambda a: [workloads.overhead(a.batch, a.input, a.output, a.branches)])


def _start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cold", action="store_true", help="on a GPU: with no compiled kernels in Triton's cache"
    )
    parser.set_defaults(url=None, sglang=None, openai=None)


def _sizes(parser: argparse.ArgumentParser, **sizes: int) -> None:
    for name, value in sizes.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=_count, default=value, metavar="N", help=f"(default {value})")


def _warm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--warm-prefix", action="store_true", help="over HTTP: run each prefix once, then fork it"
    )


def _whole(text: str, least: int = 0) -> int:
    """Read a whole number. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return int(text)


def _count(text: str) -> int:
    return _whole(text, least=1)


def pairs(text: str) -> list[tuple[int, int]]:
    """Read pairs like `8x2048,1x2048`; an empty text has none. Raises ArgumentTypeError."""
    try:
        return [(_count(a), _count(b)) for a, _, b in (p.partition("x") for p in text.split(",") if p)]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 8x2048,1x2048") from None


# --- running ------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write what was asked for. Raises RamifyError, OSError."""
    _check(args)
    for path in filter(None, (args.json, args.plot)):
        if not path.parent.is_dir():  # now, not when everything is measured
            raise BadRequest(f"{path}: there is no folder {path.parent}")
    if args.plot is not None:
        plot.check(args.plot)
    made = _start_report(args) if args.workload == "start" else _load_report(args)
    print(shown(report.headline(made)))
    print()
    print(shown(report.text(made)))
    if args.json is not None:
        report.write(made, args.json)
        say(f"written to {args.json}")
    if args.plot is not None:
        plot.draw([made], args.plot)
        say(f"drawn to {args.plot}")
    return 0


def run_plot(args: argparse.Namespace) -> int:
    """Draw reports for comparison. Raises BadRequest, OSError."""
    plot.draw([report.read(path) for path in args.reports], args.output)
    return 0


def say(line: str) -> None:
    """Print a line of progress."""
    print(shown(line), file=sys.stderr, flush=True)


def _check(args: argparse.Namespace) -> None:
    """Raises BadRequest for flags that do not go together."""
    if not args.serve and (args.serve_flags or args.shape):
        raise BadRequest("--shape, and flags after --, are for the server that --serve starts")
    if args.append_ahead and (args.sglang or args.openai):
        raise BadRequest(HISTORY_ONLY)
    if args.warm_prefix and not (args.sglang or args.openai):
        raise BadRequest("--warm-prefix is for servers over HTTP: Ramify needs no such help")
    if args.workload == "latency" and not (args.decode or args.prefill):
        raise BadRequest("nothing to measure: give --decode or --prefill some sizes, such as 8x1024")
    if args.workload == "throughput":
        for name in ("input", "output"):
            if getattr(args, f"{name}_min") > getattr(args, f"{name}_max"):
                raise BadRequest(f"--{name}-min is more than --{name}-max")
    if args.openai and args.model is None:
        raise BadRequest("--openai needs --model NAME, as /v1/models lists it")


def _start_report(args: argparse.Namespace) -> dict[str, Any]:
    case = measure.measure_start(
        args.serve_flags,
        args.shape,
        cold=args.cold,
        repeats=args.repeats,
        warmup=args.warmup,
        say=say,
    )
    engine = {"kind": "ramify"}
    return report.assemble("start", args.label or "ramify", engine, options(args), [case])


def _load_report(args: argparse.Namespace) -> dict[str, Any]:
    cases: Sequence[Case] = args.cases(args)
    with _target(args) as (target, ready_s):
        for case in cases:
            measure.check(case, target, args.processes)
        info = server.about(target)
        top = _top(args.ids, info)
        with Crowd(args.processes) as crowd:
            found = [
                measure.measure(
                    case,
                    target,
                    crowd,
                    top=top,
                    seed=args.seed,
                    repeats=args.repeats,
                    warmup=args.warmup,
                    say=say,
                )
                for case in cases
            ]
    engine = {"kind": target.kind, "url": target.url, "info": info}
    made = report.assemble(
        args.workload, args.label or _label(target, info), engine, options(args) | {"ids": top}, found
    )
    if ready_s is not None:
        made["ready_s"] = ready_s
    return made


@contextmanager
def _target(args: argparse.Namespace) -> Iterator[tuple[Target, float | None]]:
    """Give the server, and how long it took to start if it is ours."""
    common: dict[str, Any] = {
        "model": args.model,
        "token": args.token or (os.environ.get("RAMIFY_TOKEN") if args.url is not None else None),
        "temperature": args.temperature,
        "warm_prefix": args.warm_prefix,
    }
    if args.serve:
        with server.served(args.serve_flags, args.shape) as ours:
            yield Target("ramify", ours.url, **common), ours.ready_s
    elif args.url is not None:
        yield Target("ramify", websocket_url(args.url), **common), None
    else:
        kind, url = ("sglang", args.sglang) if args.sglang else ("openai", args.openai)
        if not url.startswith(("http://", "https://")):
            raise BadRequest(f"{url!r} is not a server's address: give http://host:port")
        yield Target(kind, url.rstrip("/").removesuffix("/v1"), **common), None


def _top(given: int | None, info: dict[str, Any]) -> int:
    """Find the bound of prompt ids. A Ramify server tells its vocabulary; for others a flag must."""
    model = info.get("model")
    size = model.get("vocab_size") if isinstance(model, dict) else None
    if given is not None and size is not None and given > size:
        raise BadRequest(f"--ids {given}: the model knows {size} tokens")
    return given if given is not None else min(IDS, size or IDS)


def _label(target: Target, info: dict[str, Any]) -> str:
    model = info.get("model")
    name = model.get("model") if isinstance(model, dict) else info.get("model_path", target.model)
    return f"{target.kind} {str(name or '').rstrip('/').rpartition('/')[2]}".strip()


def options(args: argparse.Namespace) -> dict[str, Any]:
    """Make the flags as JSON, without the token."""
    skipped = ("run", "cases", "token", "workload")
    plain = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    plain["serve_flags"] = report.without_tokens(args.serve_flags)
    return {name: value for name, value in plain.items() if name not in skipped}
