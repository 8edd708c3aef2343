"""Sums over ranks, and how long it takes to tell them a step.

    python benchmarks/rank_sums.py --ranks 2

On GPUs: NCCL and the kernel for few rows (`ops.triton_sums`), each 50 times in a CUDA graph. On CPUs:
gloo. A message is told as rank 0 tells a step; both ends read the same clock.
"""

import argparse
import os
import statistics
import struct
import subprocess
import sys
import time
from typing import Any

import torch

from ramify.gpu.ranks.group import Ranks
from ramify.gpu.ranks.peers import PeerRows, meet
from ramify.gpu.ranks.ring import GroupMemory, RankPlace

HIDDEN, REPEATS, MESSAGES = 4096, 50, 300
SIZES = [1 << power for power in range(14, 24)]  # bytes of a rank's part: 16 KiB to 8 MiB
TOLD = 2048  # bytes, about a step of 32 decodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--place", type=int, nargs="*")
    asked = parser.parse_args()
    if asked.place:
        rank, ranks, store, ring, *bells = asked.place
        be(RankPlace(rank, ranks, store, ring, bells))
        return
    with GroupMemory(asked.ranks) as memory:
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--place",
                    *map(str, (place.rank, place.ranks, *place.descriptors)),
                ],
                pass_fds=place.descriptors,
            )
            for place in memory.places
        ]
    sys.exit(max(process.wait() for process in processes))


def be(place: RankPlace) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", place.rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    ranks = Ranks(place, device)
    if place.rank == 0:
        print(f"{place.ranks} ranks, {torch.cuda.get_device_name() if on_gpu else 'CPU'}", flush=True)
    told(ranks)
    if on_gpu:
        ranks.peers = together(place, device)
    for size in SIZES:
        x = torch.ones(size // HIDDEN // 2, HIDDEN, dtype=torch.bfloat16, device=device)
        found = f"{size >> 10:6} KiB: library {timed(lambda x=x: ranks.sum(x), device):8.1f} us"
        peers = ranks.peers
        if peers is not None and len(x) <= peers.rows:
            from ramify.gpu.ops.triton_sums import sum_rows

            took = timed(lambda x=x, peers=peers: sum_rows(x, peers), device)
            x.fill_(1 + place.rank)
            wanted = sum(range(1, place.ranks + 1))
            right = bool((sum_rows(x, peers) == wanted).all())
            found += f", ours {took:8.1f} us, {'right' if right else 'WRONG'}"
        if place.rank == 0:
            print(found, flush=True)
    ranks.close()
    os._exit(0)


def together(place: RankPlace, device: torch.device) -> PeerRows:
    """Torch wants a process group of its own making."""
    dist: Any = torch.distributed
    store = dist.FileStore(f"/proc/self/fd/{place.store}", place.ranks)
    world = dist.PrefixStore("world", store)
    dist.init_process_group("gloo", store=world, rank=place.rank, world_size=place.ranks)
    name, peers = dist.group.WORLD.group_name, dist.PrefixStore("peers", store)
    return meet(peers, name, place.rank, place.ranks, HIDDEN, torch.bfloat16, device)


def told(ranks: Ranks) -> None:
    """Microseconds from the writer's call to the reader's hands."""
    took = []
    for _ in range(MESSAGES):
        if ranks.rank == 0:
            time.sleep(0.002)
            ranks.ring.put(struct.pack("=q", time.perf_counter_ns()) + bytes(TOLD))
        else:
            message = ranks.ring.take(10)
            assert message is not None
            took.append((time.perf_counter_ns() - struct.unpack_from("=q", message)[0]) / 1e3)
    if ranks.rank == 1:
        took.sort()
        print(
            f"told {TOLD} bytes: median {statistics.median(took):.1f} us, p99 {took[-4]:.1f}", flush=True
        )


def timed(run: object, device: torch.device) -> float:
    """Microseconds of a call."""
    assert callable(run)
    if device.type == "cpu":
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return statistics.median(times) * 1e6
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(5):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / REPEATS)
    return statistics.median(found)


if __name__ == "__main__":
    main()
