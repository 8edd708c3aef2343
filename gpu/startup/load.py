"""The way from a ModelConfig to a running executor: config.json, weights, KV pool, attention.

The one place that knows all parts. Progress is reported throughout, because a person waits.
"""

import gc
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from ramify.gpu.attention.base import AttentionBackend
from ramify.gpu.attention.registry import KernelChoice, choose
from ramify.gpu.devices import cores, loading_threads
from ramify.gpu.drafting.base import Drafter
from ramify.gpu.drafting.model import CATCH_UP, DraftRunner, ModelDrafter
from ramify.gpu.drafting.mtp import MtpDrafter, MtpPasses
from ramify.gpu.drafting.ngram import NgramDrafter
from ramify.gpu.drafting.torch_runner import TorchRunner
from ramify.gpu.executors.base import Executor, Follower
from ramify.gpu.executors.follower import MirroredRows, RankTold, TorchFollower
from ramify.gpu.executors.torch_executor import TorchExecutor
from ramify.gpu.kv.layout import KVLayout, KVPool
from ramify.gpu.models.config import read_config
from ramify.gpu.models.decoder import EMBEDDING, Decoder
from ramify.gpu.models.mtp import MtpLayer
from ramify.gpu.models.parts import with_tower
from ramify.gpu.models.split import leave_biases_to_first
from ramify.gpu.ops.linear.base import Form, Weight, plain_weight
from ramify.gpu.ops.linear.humming import told
from ramify.gpu.ops.linear.onednn import float_weight
from ramify.gpu.ops.ranked_ops import RankedTorchOps
from ramify.gpu.ops.torch_ops import TorchOps
from ramify.gpu.progress import Progress
from ramify.gpu.ranks.ring import RankPlace
from ramify.gpu.startup.drafts import DraftChoice, choose_draft, device_drafter, kernel_obstacle
from ramify.gpu.startup.gguf_weights import load_gguf
from ramify.gpu.startup.machine import context_of, device_of, dtype_of, executor_info
from ramify.gpu.startup.memory import (
    check_host,
    free_bytes,
    has_windows,
    kv_type,
    with_pages,
)
from ramify.gpu.startup.mtp import empty_mtp, fill_mtp, load_mtp
from ramify.gpu.startup.packing import Packing
from ramify.gpu.startup.pictures import empty_pictures, no_pictures
from ramify.gpu.startup.quantization import Quantization
from ramify.gpu.startup.random_weights import fill_random
from ramify.gpu.startup.ranks import (
    Split,
    agreed,
    agreed_buckets,
    alone_of,
    guessed_here,
    join,
    quantization_of,
    ranks_of,
    rehearsing_ops,
)
from ramify.gpu.startup.stamp import kv_stamp
from ramify.gpu.startup.states import check_draft_model, check_states
from ramify.gpu.startup.weights import load_weights
from ramify.gpu.step.rows import RowTable
from ramify.gpu.step.step_rows import spare_states
from ramify.gpu.vision.tower import Tower
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExecutorInfo

if TYPE_CHECKING:
    from ramify.gpu.native.host import Isa
    from ramify.gpu.ops.linear.packed import CpuForms

_TOKEN_BYTES = 4  # of a KV slot's token, where a drafter reads it
MOST_FORCED_DRAFTS = 32  # tokens that a constraint may draft for a row in a step


def load_executor(config: ModelConfig, progress: Progress) -> Executor:
    """Load the checkpoint and make everything ready to run.

    `progress(what, fraction)` is called as the work goes on, fraction in 0..1. Raises ModelError
    if the folder cannot be served on this machine.
    """
    executor = load_rank(config, progress, None)
    assert not isinstance(executor, Follower)
    return executor


def load_rank(config: ModelConfig, progress: Progress, place: RankPlace | None) -> Executor | Follower:
    """Load one of several ranks, at `place`: rank 0 has the executor, the others follow it."""
    begin = time.perf_counter()
    progress("reading config.json", 0.0)
    shape = read_config(config.path)
    device = device_of(config, 0 if place is None else place.rank)
    split = join(config, shape, device, place)
    shape = shape if split is None else split.shape
    dtype = dtype_of(config, shape, device)
    torch.set_num_threads(config.threads or min(torch.get_num_threads(), cores()))
    context = context_of(config, shape)
    quantization = quantization_of(config, shape, device)
    windows = has_windows(config, shape, context)
    shapes = shape.attention_shapes(dtype, windows, config.kv_dtype == "fp8")
    attention = choose(config.attention, shapes, device, config.deterministic)
    draft = choose_draft(config, attention if quantization.isa is None else None)
    check_states(config, shape, attention)
    try:
        model = Decoder(shape, context, dtype, device, quantization.is_late)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the weights do not fit into the memory of {device} ({free_bytes(device) >> 20} MiB are "
            "free): free memory, or give a smaller model or dtype"
        ) from error
    on_host = quantization.isa is not None or attention.extend == "torch"
    parameters = model.parameters() if split is None else split.parameters
    info = executor_info(config, shape, parameters, context, dtype, device, attention, windows)
    info = msgspec.structs.replace(
        info, quantization=quantization.name, quantization_reason=quantization.reason, constrains=True,
        pictures_reason=no_pictures(config, split.whole if split else shape, quantization, device),
    )  # fmt: skip
    jumps = config.jump_forward
    if shape.keeps_states:  # there are states for drafts
        jumps = jumps and on_host and draft.kind != "none"
    if info.constrains and jumps:
        info = msgspec.structs.replace(info, max_forced=MOST_FORCED_DRAFTS)
    if draft.kind != "none":
        info = msgspec.structs.replace(
            info,
            drafter=draft.kind,
            max_drafts=config.draft_tokens,
            drafts_from_history=True,
            guesses_constrained=on_host,
        )
    check_host(info, config)
    executor: Executor | Follower
    if quantization.isa is not None:
        executor = _integers(config, model, info, quantization, quantization.isa, draft, progress)
    elif attention.extend == "torch":
        executor = _torch(config, model, info, attention, draft, progress, quantization, split)
    else:
        executor = _cuda(config, model, info, attention, draft, progress, quantization, split)
    progress("ready", 1.0)
    stamp = kv_stamp(config, executor.info) if executor.info.host_blocks else ""
    executor.info = msgspec.structs.replace(
        executor.info, load_seconds=round(time.perf_counter() - begin, 3), kv_stamp=stamp,
        quantization_reason=told(executor.info.quantization_reason, model.products()),
    )  # fmt: skip
    return executor


def _fill(
    config: ModelConfig, model: Decoder, form: Form, progress: Progress, folder: Path | None = None,
    stored: tuple[type[Weight], ...] = (), tower: Tower | None = None, split: Split | None = None,
    forms: "CpuForms | None" = None,
) -> None:  # fmt: skip
    """Load the weights, those in `folder` if it is given, each into its form as soon as it is there.

    `stored`: see `Packing`. `tower`: is loaded, too. `split`: if this rank has a part of the model.
    `forms`: gives the embedding a form of its own.
    """
    with loading_threads(model.parameters()):
        views, names = model.weights(), model.config.names
        if tower is not None:
            views, names = views | tower.weights(), with_tower(names, tower.settings)
        more = []
        if forms is not None:
            form = forms.with_table(form, model.head, model.table, model.config.tied)
            more = [] if model.config.tied else [(model.table, [EMBEDDING])]
        packing = Packing(views, (*model.products(), *more), form, stored)
        if config.load_format == "dummy":
            progress("making random weights", 0.0)
            fill_random(views, loaded=packing.loaded, begin=packing.begin)
        elif (place := folder or config.path).is_file():
            load_gguf(place, views, progress, model.config, packing)
        else:
            cut, written = None if split is None else split.cuts(model), model.config.stored
            load_weights(place, views, progress, packing, names, written, cut)
        if split is not None and split.ranks.rank:
            leave_biases_to_first(model)
        with torch.inference_mode():
            model.complete()


def _fill_both(
    config: ModelConfig, model: Decoder, guesser: Decoder | MtpLayer | None, draft: DraftChoice,
    quantization: Quantization, progress: Progress, split: Split | None, tower: Tower | None,
) -> None:  # fmt: skip
    """Load the model and the drafter's; floats are plain in deterministic mode and beside experts."""
    for each, folder in ((model, None), (guesser, draft.folder)):
        if isinstance(each, MtpLayer):
            fill_mtp(config, each, progress, split)
        elif each is not None:
            plain = config.deterministic or each.config.has_experts
            floats = plain_weight if plain else float_weight
            rows = None if config.deterministic else model.dtype
            form = quantization.form(model.device, floats, rows) if each is model else (floats, ())
            own = (tower, split) if each is model else (None, None)
            _fill(config, each, form[0], progress, folder, form[1], *own)


def _draft_model(
    config: ModelConfig, draft: DraftChoice, context: int, like: Decoder, form: Form, progress: Progress,
    forms: "CpuForms | None" = None,
) -> Decoder | None:  # fmt: skip
    """Load the draft model, in the dtype and on the device of the model; None: there is none.

    Its context is its own, if that is shorter.
    """
    model = _empty_draft_model(draft, context, like)
    if model is not None:
        progress("reading the draft model", 0.0)
        _fill(config, model, form, progress, draft.folder, forms=forms)
    return model


def _empty_draft_model(draft: DraftChoice, context: int, like: Decoder) -> Decoder | None:
    """Make the draft model without its weights; None: there is none."""
    if draft.folder is None:
        return None
    shape = read_config(draft.folder)
    check_draft_model(draft.folder, shape)
    return Decoder(shape, min(context, shape.context), like.dtype, like.device)


def _empty_guesser(
    config: ModelConfig, draft: DraftChoice, context: int, like: Decoder
) -> Decoder | MtpLayer | None:
    """Make the model that guesses on Triton kernels, without its weights; None: none does."""
    if draft.kind == "mtp":
        return empty_mtp(config, like)
    guesser = _empty_draft_model(draft, context, like)
    obstacle = guesser and kernel_obstacle(guesser.config, guesser.dtype, guesser.device)
    if obstacle:
        raise ModelError(
            f"--draft {config.draft}: {obstacle}; give another draft model, --draft ngram or --draft "
            "none"
        )
    return guesser


def _torch(
    config: ModelConfig, model: Decoder, info: ExecutorInfo, attention: KernelChoice, draft: DraftChoice,
    progress: Progress, quantization: Quantization, split: Split | None,
) -> Executor | Follower:  # fmt: skip
    """Make the executor on torch operators."""
    form, stored = quantization.form(model.device, float_weight)
    pictures = empty_pictures(config, model, info)
    tower = None if pictures is None else pictures.tower
    _fill(config, model, form, progress, stored=stored, tower=tower, split=split)
    if pictures is not None:
        info = pictures.described(info)
    follows = split is not None and split.ranks.rank > 0
    small = None
    if not follows:
        small = _draft_model(config, draft, info.context, model, float_weight, progress)
    mtp = load_mtp(config, model, progress, split) if draft.kind == "mtp" else None
    guesser = small if mtp is None else mtp.decoder
    if guesser is not None:
        info = _with_bytes(info, guesser.config.kv_layout(guesser.dtype))
    free = free_bytes(model.device)
    info = with_pages(info, config, free if split is None else split.share(free), model.device)
    info = agreed(split, info)
    pool = _pool(model, info, progress)
    table = MirroredRows(info) if follows else RowTable(info)

    def back_end(model: Decoder, windows: bool = False) -> AttentionBackend:
        shapes = model.config.attention_shapes(model.dtype, windows)
        return attention.back_end(table, shapes, model.device)

    attends = back_end(model, info.window_pages > 0)
    ranks, passes = ranks_of(split), None
    drafter: Drafter | None = NgramDrafter(info.max_rows) if draft.kind == "ngram" else None
    if guesser is not None:
        own = msgspec.structs.replace(info, window_pages=0, kv_dtype="auto")
        own_pool, own_attends = _pool(guesser, own, progress), back_end(guesser)
        if mtp is not None:
            last = torch.zeros(info.max_rows, dtype=torch.int64, device=model.device)  # never read
            make = TorchOps if ranks is None else partial(RankedTorchOps, ranks, info.vocab_size)
            passes = MtpPasses(mtp, make(own_pool, last, own_attends), own_attends)
        else:
            runner = TorchRunner(guesser, own_pool, own_attends, info.max_rows)
            drafter = _model_drafter(runner, table, guesser)
    if ranks is not None and isinstance(table, MirroredRows):
        return TorchFollower(model, pool, attends, table, info, ranks, passes)
    others = None if ranks is None else RankTold(ranks, table)
    if passes is not None:
        tell = {} if others is None else {"tell": others.tell_pass}
        drafter = MtpDrafter(passes, info.context, **tell)
    return TorchExecutor(
        model, pool, attends, table, info, drafter=drafter, pictures=pictures, others=others
    )


def _model_drafter(runner: DraftRunner, table: RowTable, model: Decoder) -> ModelDrafter:
    size, slots = model.config.vocab_size, table.pool_pages * table.page_size
    return ModelDrafter(runner, table, model.context, size, slots)


def _with_bytes(info: ExecutorInfo, layout: KVLayout) -> ExecutorInfo:
    """Add the bytes of the draft model's KV of a token to `info`."""
    total = info.kv_bytes_per_token + layout.bytes_per_token
    return msgspec.structs.replace(info, kv_bytes_per_token=total)


def _integers(
    config: ModelConfig, model: Decoder, info: ExecutorInfo, quantization: Quantization, isa: "Isa",
    draft: DraftChoice, progress: Progress,
) -> Executor:  # fmt: skip
    """Make the executor on the CPU's kernels, with weights as integers."""
    from ramify.gpu.drafting.cpu_runner import CpuRunner
    from ramify.gpu.executors.cpu_executor import CpuExecutor
    from ramify.gpu.native.crew import MOST_THREADS
    from ramify.gpu.native.kernels import Kernels
    from ramify.gpu.native.packer import Packer
    from ramify.gpu.native.threads import Crew
    from ramify.gpu.ops.cpu_ops import KV_DTYPE, CpuOps, endings, obstacle
    from ramify.gpu.ops.linear.packed import CpuForms

    forms = CpuForms(Packer(isa), quantization.name == "int4", quantization.kept)
    _fill(config, model, forms.form, progress, stored=forms.stored, forms=forms)
    small = _draft_model(config, draft, info.context, model, forms.rounded, progress, forms)
    layout = model.config.kv_layout(KV_DTYPE, info.window > 0)
    info = msgspec.structs.replace(
        info, kv_bytes_per_token=layout.bytes_per_token,
        window_bytes=layout.bytes_per_window_page, attention="int8",
        attention_reason=f"a part of --quantization {quantization.name}",
    )  # fmt: skip
    if small is not None:
        experts = small.config.has_experts
        reason = "it has experts" if experts else obstacle(small.config, info.page_size)
        if reason is not None:
            raise ModelError(
                f"--draft {config.draft} cannot be served as integers: {reason}; give --quantization "
                "none, another draft model, --draft ngram or --draft none"
            )
        info = _with_bytes(info, small.config.kv_layout(KV_DTYPE))
    info = with_pages(info, config, free_bytes(model.device), model.device)
    progress("compiling kernels", 0.0)
    kernels = Kernels(
        isa, model.config.attention.head_dim, KV_DTYPE,
        *endings(model.config, model.products(), model.table),
    )  # fmt: skip
    progress(f"allocating KV cache for {info.pages * info.page_size} tokens", 1.0)
    layout, table = model.config.kv_layout(KV_DTYPE, info.window_pages > 0), RowTable(info)
    pool = layout.allocate(info.pages, info.page_size, model.device, info.window_pages)
    ops = CpuOps(kernels, pool, info.step_tokens + info.max_rows, table.max_length, model.table)
    crew = Crew(isa, min(torch.get_num_threads(), MOST_THREADS))
    drafter: Drafter | None = NgramDrafter(info.max_rows) if draft.kind == "ngram" else None
    if small is not None:
        ends = endings(small.config, small.products(), small.table)
        own = Kernels(isa, small.config.attention.head_dim, KV_DTYPE, *ends)
        small_pool = small.config.kv_layout(KV_DTYPE).allocate(info.pages, info.page_size, model.device)
        room = max(CATCH_UP, info.max_rows)
        small_ops = CpuOps(own, small_pool, room, small.context, small.table)
        runner = CpuRunner(small, small_ops, crew, table, info.max_drafts, info.max_rows)
        drafter = _model_drafter(runner, table, small)
    return CpuExecutor(model, ops, crew, table, info, drafter)


def _cuda(
    config: ModelConfig, model: Decoder, info: ExecutorInfo, attention: KernelChoice, draft: DraftChoice,
    progress: Progress, quantization: Quantization, split: Split | None,
) -> Executor | Follower:  # fmt: skip
    """Make the executor on Triton kernels.

    It is made twice: first with a pool of one page, to measure the memory that serving takes
    (`rehearsal`), then with the pool that fits. Kernels are compiled while the weights are loaded,
    because compiling needs only their shapes. On a CPU they are interpreted.
    """
    from ramify.gpu.executors.cuda_executor import CudaExecutor
    from ramify.gpu.executors.cuda_ranks import cuda_executor
    from ramify.gpu.startup.compiling import compiling
    from ramify.gpu.startup.rehearsal import rehearse, warm_all

    draft = guessed_here(split, draft)
    guesser = _empty_guesser(config, draft, info.context, model)
    if split is not None and not config.deterministic:  # where sums of all sizes are made alike
        split.ranks.meet(model.config.hidden_size, model.dtype, info.step_tokens + info.max_rows)

    pictures = empty_pictures(config, model, info)
    tower = None if pictures is None else pictures.tower
    info = info if pictures is None else pictures.described(info)
    fill = partial(_fill_both, config, model, guesser, draft, quantization, progress, split, tower)
    drafter = device_drafter(draft, guesser, msgspec.structs.replace(info, pages=1), alone_of(split))
    if drafter is not None:  # it may read the tokens of the slots, wherever they came from
        token = _TOKEN_BYTES if drafter.reads_tokens else 0
        info = msgspec.structs.replace(
            info, drafter=drafter.name, max_drafts=config.draft_tokens, drafts_from_history=False,
            kv_bytes_per_token=info.kv_bytes_per_token + drafter.bytes_per_token + token,
        )  # fmt: skip
    compiled = model.device.type == "cuda"
    early = compiled and quantization.name == "none"  # else the weights' form is not known yet
    if not early:
        fill()
    free = free_bytes(model.device)
    # states of padding are not kept, so one slot will do
    small = msgspec.structs.replace(
        info, pages=1, state_slots=int(info.state_bytes > 0), window_pages=int(info.window > 0)
    )
    if attention.compiles:
        progress("compiling FlashInfer's kernels: minutes, once", 0.0)
    try:
        pool = _pool(model, small, lambda what, done: None)
        ops = rehearsing_ops(split, small)
        stage = CudaExecutor(model, pool, RowTable(small), small, attention, drafter, ops, pictures)
        if compiled:
            with compiling(partial(warm_all, stage), model.device):
                if early:
                    fill()
                progress("compiling kernels that Triton's cache does not hold", 0.0)
        rehearsal = rehearse(stage, free, progress, None if attention.deterministic else model)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the largest step does not fit beside the weights ({free >> 20} MiB were free): lower "
            "--max-rows and --step-tokens, free memory, or give a smaller model"
        ) from error
    stage.close()
    buckets = agreed_buckets(split, rehearsal.buckets)
    del stage, pool, drafter
    if compiled:
        gc.collect()
        torch.cuda.empty_cache()
    sizes = {bucket.extended for bucket in buckets if bucket.extended}
    info = msgspec.structs.replace(info, extend_sizes=sorted(sizes))
    info = agreed(split, with_pages(info, config, free - rehearsal.bytes, model.device))
    try:
        pool = _pool(model, info, progress)
        drafter = device_drafter(draft, guesser, info, ranks_of(split))
        executor = cuda_executor(model, pool, info, attention, drafter, ranks_of(split), pictures)
        executor.capture(buckets, progress)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"a KV cache of {info.pages * info.page_size} tokens leaves too little for steps and CUDA "
            "graphs: lower --kv-tokens or --kv-fraction, or free memory"
        ) from error
    return executor


def _pool(model: Decoder, info: ExecutorInfo, progress: Progress) -> KVPool:
    progress(f"allocating KV cache for {info.pages * info.page_size} tokens", 1.0)
    dtype, spare = kv_type(info.kv_dtype, model.dtype), spare_states(info)
    layout = model.config.kv_layout(dtype, info.window_pages > 0)
    pool = layout.allocate(info.pages, info.page_size, model.device, info.window_pages)
    if info.state_slots and model.config.keeps_states:
        pool.states = model.config.state_layout().allocate(info.state_slots, model.device, spare)
    return pool
