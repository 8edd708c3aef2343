"""Turn a corpus folder into a tokenizer and packed token files.

Three steps, each a subcommand: `clean` applies the licence and content filters and writes a smaller
folder, `tokenizer` trains the byte-level BPE with its chat template, `pack` writes token files.
Does not know the model; `train.py` reads what `pack` writes:

    NAME.tokens.npy   uint16 [N]   token ids, documents one after the other
    NAME.mask.npy     uint8  [N]   1 where a token belongs to a text or to an assistant's turn
    NAME.starts.npy   int64  [D+1] first token of each document, and N
"""

from __future__ import annotations

import argparse
import json
import lzma
import multiprocessing
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import corpus
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Words with their leading space, every digit alone (so that sums line up), runs of punctuation.
SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


def new_tokenizer() -> Tokenizer:
    """An untrained byte-level BPE with this project's way of splitting text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Learn `size` tokens, the special ones first (ids 0, 1, 2)."""
    tokenizer = new_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int = 2048) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": ["<|im_start|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def turns(messages: list[corpus.Message]) -> Iterator[tuple[str, bool]]:
    """The pieces of a conversation as the chat template writes it; True: the assistant's own."""
    for message in messages:
        yield f"<|im_start|>{message['role']}\n", False
        own = message["role"] == "assistant"
        yield message["content"] + "<|im_end|>", own
        yield "\n", False


_WORKER: dict[str, Tokenizer] = {}


def _start_worker(path: str) -> None:
    _WORKER["tokenizer"] = Tokenizer.from_file(path)


def encode_document(text: str) -> tuple[list[int], list[int]]:
    """Ids and mask of a text document; it begins with the end-of-text token, and all of it counts."""
    ids = [0, *_WORKER["tokenizer"].encode(text).ids]
    return ids, [1] * len(ids)


def encode_conversation(messages: list[corpus.Message]) -> tuple[list[int], list[int]]:
    """Ids and mask of a conversation."""
    return encode_pieces(list(turns(messages)))


def encode_pieces(pieces: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Ids and mask of a document in pieces; True: learnt from."""
    ids: list[int] = []
    mask: list[int] = []
    for piece, counts in pieces:
        part = _WORKER["tokenizer"].encode(piece).ids
        ids += part
        mask += [int(counts)] * len(part)
    return ids, mask


def pack(
    name: str, records: Iterable[Any], encode: Any, tokenizer: Path, out: Path, workers: int
) -> int:
    """Encode `records` in parallel and write the three files; the number of tokens."""
    began = time.perf_counter()
    tokens: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    starts = [0]
    with multiprocessing.Pool(workers, _start_worker, (str(tokenizer),)) as pool:
        for ids, mask in pool.imap(encode, records, chunksize=256):
            tokens.append(np.asarray(ids, dtype=np.uint16))
            masks.append(np.asarray(mask, dtype=np.uint8))
            starts.append(starts[-1] + len(ids))
    np.save(out / f"{name}.tokens.npy", np.concatenate(tokens))
    np.save(out / f"{name}.mask.npy", np.concatenate(masks))
    np.save(out / f"{name}.starts.npy", np.asarray(starts, dtype=np.int64))
    seconds = time.perf_counter() - began
    print(
        f"{name}: {len(tokens)} documents, {starts[-1] / 1e6:.2f}M tokens, {seconds:.1f} s", flush=True
    )
    return starts[-1]


def clean(source: Path, out: Path, seed: int = 0) -> None:
    """Write the parts of the corpus that pass the filters, thinned as TEXT_FILES says."""
    out.mkdir(parents=True, exist_ok=True)
    for name, share in {**corpus.TEXT_FILES, "valid_text.txt": 1.0}.items():
        rng = random.Random(f"{seed}{name}")
        kept = [text for text in corpus.documents(source, name) if rng.random() < share]
        with lzma.open(out / f"{name}.xz", "wt", encoding="utf-8", preset=6) as file:
            file.write((corpus.DOCUMENT_END + "\n").join(kept))
        print(f"{name}: {len(kept)} documents", flush=True)
    for name in [*corpus.CHAT_FILES, "valid_chat.jsonl"]:
        count = 0
        with lzma.open(out / f"{name}.xz", "wt", encoding="utf-8", preset=6) as file:
            for origin, messages in corpus.conversations(source, name):
                count += 1
                record = {"messages": messages, "source": origin}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        print(f"{name}: {count} records", flush=True)


def sample_texts(source: Path, share: float, seed: int = 0) -> Iterator[str]:
    """A sample of everything for the tokenizer: text thinly, chat and synthetic data in full."""
    import synthesize

    rng = random.Random(seed)
    for name in corpus.TEXT_FILES:
        yield from (text for text in corpus.documents(source, name) if rng.random() < share)
    for name in corpus.CHAT_FILES:
        for _, messages in corpus.conversations(source, name):
            yield from (message["content"] for message in messages)
    for messages in synthesize.conversations(30_000, seed):
        yield from (message["content"] for message in messages)


def pack_all(
    source: Path, tokenizer: Path, out: Path, synthetic: int, shown: int, workers: int, seed: int
) -> None:
    """Write train and valid token files for text, corpus chat and synthetic chat."""
    import synthesize

    out.mkdir(parents=True, exist_ok=True)
    path = tokenizer / "tokenizer.json"
    text = (doc for name in corpus.TEXT_FILES for doc in corpus.documents(source, name))
    pack("text", text, encode_document, path, out, workers)
    for name in corpus.CHAT_FILES:
        records = (messages for _, messages in corpus.conversations(source, name))
        pack(name.removesuffix(".jsonl"), records, encode_conversation, path, out, workers)
    held_text = corpus.documents(source, "valid_text.txt")
    pack("valid_text", held_text, encode_document, path, out, workers)
    held_chat = (messages for _, messages in corpus.conversations(source, "valid_chat.jsonl"))
    pack("valid_chat", held_chat, encode_conversation, path, out, workers)
    for name, number in (("synthetic", 1), ("synthetic_chat", 2)):
        made = synthesize.parallel(synthesize.conversations, synthetic * number, seed + number, workers)
        pack(name, made, encode_conversation, path, out, workers)
    made = synthesize.parallel(synthesize.shown, shown, seed + 3, workers)
    pack("shown", made, encode_pieces, path, out, workers)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("clean", "tokenizer", "pack"):
        command = commands.add_parser(name)
        command.add_argument("--corpus", type=Path, required=True, help="folder of the corpus")
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--seed", type=int, default=0)
        if name == "tokenizer":
            command.add_argument("--size", type=int, default=8192)
            command.add_argument("--share", type=float, default=0.12, help="share of the text files")
        if name == "pack":
            command.add_argument("--tokenizer", type=Path, required=True)
            command.add_argument(
                "--synthetic",
                type=int,
                default=400_000,
                help="conversations for pretraining; twice as many for the chat stage",
            )
            command.add_argument(
                "--shown", type=int, default=200_000, help="documents of what the page shows"
            )
            command.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    args = parser.parse_args()
    if args.command == "clean":
        clean(args.corpus, args.out, args.seed)
    elif args.command == "tokenizer":
        texts = sample_texts(args.corpus, args.share, args.seed)
        save_tokenizer(train_tokenizer(texts, args.size), args.out)
    else:
        pack_all(
            args.corpus, args.tokenizer, args.out, args.synthetic, args.shown, args.workers, args.seed
        )


if __name__ == "__main__":
    main()
