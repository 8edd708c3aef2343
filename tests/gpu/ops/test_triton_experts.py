"""The kernels of layers of experts against torch's, which their own tests check."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
# the interpreter of 3.6 does not know numpy 2.4
pytest.importorskip("triton", minversion=None if CUDA else "3.7")

from ramify.gpu.ops import triton_experts_many  # noqa: E402
from ramify.gpu.ops.experts import (  # noqa: E402
    ExpertActivation,
    LayerExperts,
    RouterSettings,
    SharedExpert,
    gated,
    route,
    run,
)
from ramify.gpu.ops.linear.base import Linear, PlainWeight, plain  # noqa: E402
from ramify.gpu.ops.linear.four_bits import packed  # noqa: E402
from ramify.gpu.ops.linear.grouped import GroupedWeight, four_bits, mxfp4  # noqa: E402
from ramify.gpu.ops.triton_experts import ExpertRoutes, route_tokens  # noqa: E402
from ramify.gpu.ops.triton_experts_few import open_few, run_few, sum_few  # noqa: E402
from ramify.gpu.ops.triton_experts_many import run_many, tile_for  # noqa: E402
from ramify.gpu.ops.triton_experts_together import open_together  # noqa: E402
from ramify.gpu.ops.triton_linear import UnscaledRows  # noqa: E402

DEVICE = torch.device("cuda" if CUDA else "cpu")
# the interpreter multiplies no bfloat16
HALF = torch.bfloat16 if CUDA else torch.float16
EXPERTS, HIDDEN, SIZE = 6, 40, 24  # none of which a tile divides


def made(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, kind)


def layer(kind: torch.dtype, case: str = "plain", top: int = 2) -> LayerExperts:
    shared, parts = None, 1 if case == "relu2" else 2
    if case in ("shared", "gated", "relu2"):
        shared = SharedExpert(
            plain(0.3 * made(parts * 36, HIDDEN, kind=kind)), plain(made(HIDDEN, 36, kind=kind)), 36,
            case == "gated", "relu2" if case == "relu2" else "gelu_tanh",
        )  # fmt: skip
    biased = case == "biased"
    known: dict[str, ExpertActivation] = {"biased": "clamped_swiglu", "plain": "silu", "relu2": "relu2"}

    def stacked(scale: float, outputs: int, inputs: int) -> Linear:
        bias = made(EXPERTS * outputs, kind=kind) if biased else None
        weight = scale * made(EXPERTS * outputs, inputs, kind=kind)
        return replace(plain(weight, bias), stacked=EXPERTS)

    return LayerExperts(
        router=plain(made(EXPERTS + (case == "gated"), HIDDEN, kind=kind)),
        correction=None,
        gate_up=stacked(0.3, parts * SIZE, HIDDEN),
        down=stacked(1.0, HIDDEN, SIZE),
        shared=shared,
        settings=RouterSettings(top=top),
        activation=known.get(case, "gelu_tanh"),
    )


def wider(one: LayerExperts) -> LayerExperts:
    """The same numbers in float32."""

    def linear(each: Linear) -> Linear:
        bias = None if each.bias is None else each.bias.float()
        return replace(plain(each.tensor.float(), bias), stacked=each.stacked)

    shared = one.shared
    if shared is not None:
        shared = replace(shared, gate_up=linear(shared.gate_up), down=linear(shared.down))
    return replace(
        one, router=linear(one.router), gate_up=linear(one.gate_up), down=linear(one.down),
        shared=shared,
    )  # fmt: skip


def many(x: Tensor, one: LayerExperts, routes: ExpertRoutes, invariant: bool = False) -> Tensor:
    beside = None
    if one.shared is not None:
        beside = one.shared.down(gated(one.shared.gate_up(x), one.shared.activation))
    return run_many(x, one, routes, beside, invariant)


def near(ours: Tensor, wanted: Tensor, kind: torch.dtype) -> None:
    error = (ours.float() - wanted).norm() / wanted.norm()
    assert error.item() < (1e-5 if kind == torch.float32 else 5e-3)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(4)


ROUTERS = {
    "softmax": RouterSettings(top=3, renormalise=False, scale=1.5),
    "renormalised": RouterSettings(top=3),
    "sigmoid": RouterSettings(top=1, score="sigmoid", renormalise=False),
    "groups": RouterSettings(top=4, score="sigmoid", scale=2.5, groups=4, top_groups=2, corrected=True),
    "groups by their best": RouterSettings(top=3, groups=3, group_best=1, top_groups=2),
    "groups of one": RouterSettings(top=2, groups=12, top_groups=3),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routes(name: str) -> None:
    """Ties go to the lower index, in groups and among them."""
    settings, tokens, experts = ROUTERS[name], 12, 12
    logits = (2 * made(tokens, experts)).round_()  # many are equal
    logits[0] = 0
    logits[1] = 100 * logits[1]
    correction = made(experts).mul_(0.3).round_(decimals=1) if settings.corrected else None
    one = replace(
        layer(torch.float32),
        correction=correction,
        settings=settings,
        gate_up=replace(plain(made(1, 1)), stacked=experts),
    )
    counts, chosen = route(logits, correction, settings)
    found = route_tokens(logits, one)
    assert torch.equal(found.chosen.long(), chosen)
    torch.testing.assert_close(found.counts, counts, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's
def test_routes_of_what_is_no_number_stay_inside() -> None:
    logits = made(3, EXPERTS)
    logits[0] = torch.nan
    logits[1, 2] = torch.nan
    logits[2] = -torch.inf
    chosen = route_tokens(logits, layer(torch.float32)).chosen
    assert chosen.min() >= 0
    assert chosen.max() < EXPERTS


@pytest.mark.parametrize("kind", [torch.float32, HALF], ids=["float32", "half"])
@pytest.mark.parametrize("case", ["plain", "shared", "gated", "biased", "relu2"])
def test_both_paths(kind: torch.dtype, case: str) -> None:
    one = layer(kind, case)
    for tokens, path in ((1, "few"), (5, "few"), (21, "many")):
        x = made(tokens, HIDDEN, kind=kind)
        routes = route_tokens(one.router(x), one)
        wide = wider(one)
        if kind != torch.float32:  # the same experts, though the logits were rounded
            wide.router = plain(torch.zeros_like(wide.router.tensor))
            wide = replace(wide, router=Given(one.router(x).float()))  # type: ignore[arg-type]
        wanted = run(x.float(), wide)
        ours = run_few(UnscaledRows(x), 0.0, one, routes) if path == "few" else many(x, one, routes)
        near(ours, wanted, kind)
        if tokens == 5:
            opened = open_together(UnscaledRows(x), 0.0, one, routes)
            near(sum_few(opened, one, routes), wanted, kind)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's: rows of experts that are elsewhere
@pytest.mark.parametrize("case", ["plain", "gated", "biased", "relu2"])
def test_experts_of_which_other_ranks_have_some(case: str) -> None:
    """Those that are here count; a token may have none of them."""
    whole = layer(torch.float32, case, 3)
    for first, last in ((0, 2), (2, 6)):
        one = replace(
            whole, first=first, total=EXPERTS, gate_up=some(whole.gate_up, first, last),
            down=some(whole.down, first, last),
        )  # fmt: skip
        for tokens in (1, 5, 40):
            x = made(tokens, HIDDEN)
            routes = route_tokens(one.router(x), one)
            wanted = run(x, one)
            near(many(x, one, routes), wanted, torch.float32)
            if tokens <= 16:
                near(run_few(UnscaledRows(x), 0.0, one, routes), wanted, torch.float32)
                opened = open_together(UnscaledRows(x), 0.0, one, routes)
                near(sum_few(opened, one, routes), wanted, torch.float32)


def some(linear: Linear, first: int, last: int) -> Linear:
    """Of those that are stacked."""
    weights, biases = zip(*linear.matrices()[first:last], strict=True)
    bias = None if biases[0] is None else torch.cat(biases)
    return replace(plain(torch.cat(weights), bias), stacked=last - first)


class Given:
    """A router whose logits are known."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def __call__(self, x: Tensor) -> Tensor:
        return self._logits


@pytest.mark.parametrize("form", ["int4", "with zeros", "with offsets", "mxfp4"])
def test_experts_in_4_bits(form: str) -> None:
    """Against the numbers that the codes stand for, in float64; a shared expert, biases, a last unit."""
    kind = HALF if form == "mxfp4" else torch.float32
    one = layer(kind, "biased" if form == "mxfp4" else "gated")

    def packing(linear: Linear) -> Linear:
        weight = linear.tensor.float().cpu()
        if form == "mxfp4":
            found = mxfp4(weight)
        else:
            found = four_bits(weight, 64 if form == "int4" else 32)
            if form != "int4":
                codes, scales = found.codes + 8, found.scales
                zeros = torch.full_like(scales, 8).index_fill_(0, torch.arange(3), 5)
                offsets = -zeros * scales if form == "with zeros" else (scales * -7.7).half().float()
                found = GroupedWeight(codes, scales, offsets, 4)
        offsets = None if found.offsets is None else found.offsets.to(DEVICE)
        found = GroupedWeight(found.codes.to(DEVICE), found.scales.to(DEVICE), offsets, found.bits)
        return replace(linear, weight=packed(found, weight.shape[1]))

    own = replace(one, gate_up=packing(one.gate_up), down=packing(one.down))
    if one.shared is not None:
        shared = replace(one.shared, gate_up=packing(one.shared.gate_up), down=packing(one.shared.down))
        own = replace(own, shared=shared)

    def doubled(linear: Linear) -> Linear:
        bias = None if linear.bias is None else linear.bias.double()
        return replace(linear, weight=PlainWeight(linear.weight.floats().double()), bias=bias)

    wide = replace(one, gate_up=doubled(own.gate_up), down=doubled(own.down))
    if own.shared is not None:
        shared = replace(own.shared, gate_up=doubled(own.shared.gate_up), down=doubled(own.shared.down))
        wide = replace(wide, shared=shared)
    for tokens in (3, 20):
        x = made(tokens, HIDDEN, kind=kind)
        logits = one.router(x)
        routes = route_tokens(logits, one)
        wide.router = Given(logits.double())  # type: ignore[assignment]
        wanted = run(x.double(), wide)
        if tokens == 3:  # rows that are divided already, or would be by 1
            squares = torch.full((tokens, 1), HIDDEN, device=DEVICE) if form == "int4" else None
            ours = run_few(UnscaledRows(x, squares), 0.0, own, routes)
        else:
            beside = None
            if wide.shared is not None:
                up = gated(wide.shared.gate_up(x.double()), wide.shared.activation)
                beside = wide.shared.down(up).to(kind)
            ours = run_many(x, own, routes, beside, False)
        near(ours, wanted.float(), kind)


@pytest.mark.parametrize("tokens", [1, 20])
def test_all_tokens_on_one_expert(tokens: int) -> None:
    """And none on the others."""
    one = layer(torch.float32, top=1)
    one.router.tensor.zero_()
    x = made(tokens, HIDDEN)
    routes = route_tokens(one.router(x), one)
    assert not routes.chosen.any()
    near(many(x, one, routes), run(x, one), torch.float32)
    near(run_few(UnscaledRows(x), 0.0, one, routes), run(x, one), torch.float32)


@pytest.mark.skipif(CUDA, reason="counts in the interpreter")
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_weights_of_experts_that_nobody_chose_are_not_read(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the others every byte, of the router none; each once for a token at a time, or for a tile."""
    from triton.runtime.interpreter import InterpreterBuilder

    addresses: list[int] = []
    load = InterpreterBuilder.create_masked_load

    def counted(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        addresses.extend(pointers.data[mask.data].flatten().tolist())
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    one = layer(torch.float32)
    x = made(tokens, HIDDEN)
    routes = route_tokens(one.router(x), one)
    routes.chosen.fill_(4)
    routes.chosen[:, 1] = 1 if tokens > 1 else 4
    addresses.clear()
    if tokens > 3:
        many(x, one, routes)
    else:
        run_few(UnscaledRows(x), 0.0, one, routes)
    times = tokens * 2 if tokens <= 3 else 2 * -(-tokens // 16)
    for weight in (one.gate_up.tensor, one.down.tensor):
        count = weight.numel() // EXPERTS
        begin, each = weight.data_ptr(), count * 4
        read = [at - begin for at in addresses if 0 <= at - begin < weight.numel() * 4]
        hit = set(routes.chosen.flatten().tolist())
        assert {at // each for at in read} == hit
        assert len(set(read)) == len(hit) * count
        assert len(read) < 1.5 * times * count  # the last tile of rows is cut


def test_rows_that_are_still_to_be_divided() -> None:
    one = layer(torch.float32, "gated")
    x = made(3, HIDDEN)
    squares = torch.stack((x[:, :9].square().sum(1), x[:, 9:].square().sum(1), 0 * x[:, 0]), 1)
    divided = x * (x.square().mean(1, keepdim=True) + 1e-3).rsqrt()
    routes = route_tokens(one.router(divided), one)
    for way in (open_few, open_together):
        opened = way(UnscaledRows(x, squares), 1e-3, one, routes)
        near(sum_few(opened, one, routes), run(divided, one), torch.float32)


@pytest.mark.parametrize("kind", [torch.float32, HALF], ids=["float32", "half"])
def test_alone_and_batched_bit_for_bit(kind: torch.dtype, ordered_dots: None) -> None:
    """What the deterministic mode runs; and the experts of a token are summed in its own order."""
    one = layer(kind, "biased", 3)
    x = made(70, HIDDEN, kind=kind)
    routes = route_tokens(one.router(x), one)
    whole = many(x, one, routes, True)
    for first, last in ((0, 1), (69, 70), (5, 30)):
        own = ExpertRoutes(routes.chosen[first:last].clone(), routes.counts[first:last].clone())
        assert torch.equal(many(x[first:last].clone(), one, own, True), whole[first:last])


def test_pairs_in_the_order_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stable, over several blocks; starts of experts that nobody chose included."""
    monkeypatch.setattr(triton_experts_many, "_SORTED", 32)
    chosen = torch.randint(1, EXPERTS - 1, (50, 2), dtype=torch.int32, device=DEVICE)
    order, starts = triton_experts_many.sort_pairs(chosen, EXPERTS)
    flat = chosen.flatten()
    assert order.tolist() == flat.sort(stable=True).indices.tolist()
    assert starts.tolist() == [int((flat < expert).sum()) for expert in range(EXPERTS + 1)]


def test_tiles_depend_on_the_batch_only_where_they_may() -> None:
    sizes = {tile_for(pairs, 128, torch.bfloat16, False) for pairs in (8, 1024, 4096, 8192, 65536)}
    assert len(sizes) == 4
    assert len({tile_for(pairs, 128, torch.bfloat16, True) for pairs in (8, 1024, 65536)}) == 1
