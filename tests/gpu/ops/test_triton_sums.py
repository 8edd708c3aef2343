"""Sums over ranks in one launch: what is written to the other rank, and what comes out, bit for bit."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ramify.gpu.ranks import peers as memories
from ramify.gpu.ranks.peers import PeerRows, room

pytest.importorskip("triton", minversion="3.7")
HIDDEN, RANKS = 48, 2


class Pair:
    """Two ranks in one process: the first is given what the second would write, so nothing waits."""

    def __init__(self, one_shot: int, rows: int = 16) -> None:
        self.rows, self.flags, size = room(RANKS, HIDDEN, torch.float32, rows)
        self.memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(RANKS)]
        places = torch.tensor([memory.data_ptr() for memory in self.memory])
        self.peers = [
            PeerRows(rank, RANKS, self.rows, one_shot, places, self.flags, self.counts())
            for rank in range(RANKS)
        ]
        self.sums, self.ahead = 0, 0

    def counts(self) -> torch.Tensor:
        return torch.zeros(self.rows, dtype=torch.int32)

    def parts(self, rank: int) -> torch.Tensor:
        """[2, rows, hidden] of a rank's memory, which the other writes."""
        return self.memory[rank][: self.flags].view(torch.float32).view(2, self.rows, HIDDEN)

    def bells(self, rank: int) -> torch.Tensor:
        """[rows] of a rank's memory."""
        return self.memory[rank][self.flags :].view(torch.int32)

    def each(self, run: Any, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        self.sums += 1
        tokens = len(xs[0])
        given = self.parts(0)[self.sums % 2, :tokens]
        given.copy_(xs[1])
        if tokens > self.peers[0].one_shot:
            given[1::2] = xs[0][1::2] + xs[1][1::2]
        self.bells(0)[:tokens] = self.sums + self.ahead  # who is ahead by one sum has rung for it
        return [run(x, peers, rank) for rank, (x, peers) in enumerate(zip(xs, self.peers, strict=True))]


@pytest.mark.parametrize("one_shot", [16, 0])
def test_ranks_get_one_sum(one_shot: int) -> None:
    from ramify.gpu.ops.rmsnorm import RMSNorm
    from ramify.gpu.ops.triton_sums import sum_add_norm, sum_rows

    torch.manual_seed(1)
    pair, norm = Pair(one_shot), RMSNorm(torch.rand(HIDDEN) + 0.5, 1e-5)
    for turn in range(3):
        pair.ahead = turn % 2
        xs, before = [torch.randn(3, HIDDEN) for _ in range(RANKS)], torch.randn(3, HIDDEN)
        residuals = [before.clone() for _ in range(RANKS)]
        if turn == 1:
            found = pair.each(lambda x, peers, _: sum_rows(x, peers), xs)
            torch.testing.assert_close(found[0], xs[0] + xs[1])
        else:
            own = norm if turn else None
            found = pair.each(
                lambda x, peers, rank, own=own, kept=residuals: sum_add_norm(x, peers, kept[rank], own),
                xs,
            )
            total = before + xs[0] + xs[1]
            wanted = total if own is None else F.rms_norm(total, (HIDDEN,), norm.weight, norm.eps)
            torch.testing.assert_close(residuals[0], total)
            torch.testing.assert_close(found[0], wanted)
            assert torch.equal(residuals[0], residuals[1])
        assert torch.equal(found[0], found[1])
        given = xs[0].clone()
        if not one_shot:
            given[::2] += xs[1][::2]
        assert torch.equal(pair.parts(1)[pair.sums % 2, :3], given)
        assert pair.bells(1)[:4].tolist() == [pair.sums] * 3 + [0]


def test_a_larger_sum_is_made_in_pieces() -> None:
    """Each of as many rows as there is memory for, in the two places by turns."""
    from ramify.gpu.ops.triton_sums import sum_rows

    torch.manual_seed(2)
    pair, xs = Pair(2, rows=2), [torch.randn(3, HIDDEN) for _ in range(RANKS)]
    assert [peers.most for peers in pair.peers] == [8, 8]
    pair.parts(0)[1], pair.parts(0)[0, 0] = xs[1][:2], xs[1][2]
    pair.bells(0).copy_(torch.tensor([2, 1]))
    for x, peers in zip(xs, pair.peers, strict=True):
        torch.testing.assert_close(sum_rows(x, peers), xs[0] + xs[1])
    assert pair.bells(1).tolist() == [2, 1]


def test_sums_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other sizes by turns, so that they lie across what the ones before left."""
    from ramify.gpu.ops import triton_halves
    from ramify.gpu.ops.rmsnorm import RMSNorm

    torch.manual_seed(3)
    monkeypatch.setattr(memories, "LEAST_HALVED", 4)
    monkeypatch.setattr(triton_halves, "_ROUND", 2)
    assert memories.halves_room(4, HIDDEN, torch.float32, 8) == 0  # of two ranks alone
    size = memories.halves_room(2, HIDDEN, torch.float32, 8)
    memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    pair = [
        triton_halves.HalvedSums(memories.halves_in(memory[1 - own], memory[own], HIDDEN, torch.float32))
        for own in range(2)
    ]
    assert [pair[0].takes(tokens) for tokens in (3, 4, 8, 9)] == [False, True, True, False]
    norm = RMSNorm(torch.rand(HIDDEN) + 0.5, 1e-5)
    for tokens in (7, 4, 8, 5, 6):
        xs, before = [torch.randn(tokens, HIDDEN) for _ in range(2)], torch.randn(tokens, HIDDEN)
        residuals, normed = ([torch.clone(before) for _ in range(2)] for _ in range(2))
        halves, others = (sums.begin(tokens) for sums in pair)
        assert halves == others
        for half in halves:
            for x, sums in zip(xs, pair, strict=True):
                sums.send(half, x[half])
            for x, sums, *to in zip(xs, pair, residuals, normed, strict=True):
                sums.add(half, x[half], to[0], norm, to[1])
        assert [list(sums.arrived()) for sums in pair] == [list(halves)] * 2
        assert not list(pair[0].arrived())
        total = before + (xs[0] + xs[1])
        for own in range(2):
            torch.testing.assert_close(residuals[own], total)
            torch.testing.assert_close(normed[own], F.rms_norm(total, (HIDDEN,), norm.weight, norm.eps))
        assert torch.equal(normed[0], normed[1])
