"""Reads the tokenizer files of a model folder, as `transformers` reads them, without importing it.

Importing it costs each process a second of CPU. Tests compare the two: the tokenizer's whole state,
the special tokens, the templates. `tokenizer.json` is the tokenizer; `tokenizer_config.json` (in old
folders also `special_tokens_map.json` and `added_tokens.json`) names the special tokens and may add
some; the chat template stands there, or in files of its own, which come first.

A folder without `tokenizer.json` has a *slow* tokenizer, which `transformers` can convert for many
models: only then it is imported. Code in a model folder is never run.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken

from ramify.protocol.checkpoint.files import JsonFiles, json_files
from ramify.protocol.errors import ModelError

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SLOW = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt")


class Pretrained(msgspec.Struct, frozen=True, eq=False):
    """What a model folder says about text."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]  # by name: "bos_token", ...
    extra_special: list[str]
    templates: str | dict[str, str] | None  # chat templates: one, or several by name

    def token_id(self, name: str) -> int | None:
        """The id of a special token by its name; that of the unknown token if it has none."""
        return None if (text := self.special_tokens.get(name)) is None else self._id(text)

    def special_ids(self) -> list[int]:
        """Of all special tokens."""
        found = (self._id(text) for text in (*self.special_tokens.values(), *self.extra_special))
        return [i for i in found if i is not None]

    def _id(self, text: str) -> int | None:
        found: int | None = self.backend.token_to_id(text)
        unknown = self.special_tokens.get("unk_token")
        return self.backend.token_to_id(unknown) if found is None and unknown is not None else found


def of_transformers(fast: Any) -> Pretrained:
    """That of a `transformers` tokenizer, however it was made."""
    return Pretrained(
        fast.backend_tokenizer,
        dict(fast.special_tokens_map),
        fast.extra_special_tokens,
        fast.chat_template,
    )


def read_pretrained(path: Path, files: JsonFiles | None = None) -> Pretrained:
    """Read `files`, those of a folder or a GGUF file. Raises ModelError that names what is wrong."""
    # One text is never tokenized by several threads: a pool of them would only be started.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    files = files or json_files(path)
    config = files("tokenizer_config.json") or {}
    if "fast_tokenizer_files" in config:  # which file counts depends on the version of `transformers`
        return _by_transformers(path, "tokenizer_config.json")
    file = path / "tokenizer.json"
    whole = files("tokenizer.json")
    if whole is None:
        return _slow(path)
    try:
        backend = tokenizers.Tokenizer.from_buffer(
            file.read_bytes() if file.is_file() else msgspec.json.encode(whole)
        )
        special, extra, added = _special_tokens(files, config, whole.get("added_tokens", []))
        _add(backend, list(special.values()), extra, added)
        if config.get("split_special_tokens"):
            backend.encode_special_tokens = True
        return Pretrained(
            backend,
            {name: str(token) for name, token in special.items()},
            [str(token) for token in extra],
            _templates(path, config),
        )
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ModelError(f"{file} cannot be loaded: {error}") from error


# --- special tokens -----------------------------------------------------------------------------


def _special_tokens(
    files: JsonFiles, config: dict[str, Any], own: list[dict[str, Any]]
) -> tuple[dict[str, AddedToken | str], list[AddedToken | str], list[AddedToken]]:
    """With a name, without one, and what files add to the tokenizer. `own`: tokenizer.json's tokens."""
    given: dict[str, Any] = {
        name: _token(value) for name, value in config.items() if _names_tokens(name)
    }
    extra = given.pop("additional_special_tokens", None)
    if extra and not given.get("extra_special_tokens"):
        given["extra_special_tokens"] = extra
    if "added_tokens_decoder" in config:
        added = {int(i): _added(token) for i, token in config["added_tokens_decoder"].items()}
    else:
        _add_mapped(given, files("special_tokens_map.json") or {})
        added = _added_by_files(files, given, own)
    by_text = {str(token): token for token in added.values()}
    extra = given.pop("extra_special_tokens", None) or []
    if isinstance(extra, dict):  # names of this model's own
        given, extra = given | extra, []
    order = [name for name in given if name not in _NAMED]
    named = {
        name: by_text.get(str(value), value) if name in _NAMED else value
        for name in (*_NAMED, *order)
        if isinstance(value := given.get(name), (str, AddedToken))
    }
    return named, list(extra), [added[i] for i in sorted(added)]


def _add_mapped(given: dict[str, Any], mapped: dict[str, Any]) -> None:
    """Add the tokens of special_tokens_map.json to those of the config."""
    for name, value in mapped.items():
        if name == "additional_special_tokens":
            given.setdefault("extra_special_tokens", [_token(each) for each in value])
        elif name == "extra_special_tokens" and isinstance(value, list):
            known = given.get(name) or []
            given[name] = known + [each for each in map(_token, value) if each not in known]
        elif _names_tokens(name):
            given[name] = _token(value)


def _added_by_files(
    files: JsonFiles, given: dict[str, Any], own: list[dict[str, Any]]
) -> dict[int, AddedToken]:
    """The tokens of added_tokens.json and tokenizer.json, by id."""
    added: dict[int, AddedToken] = {}
    names = given.get("extra_special_tokens") or []
    special = {str(token) for token in (*(given.get(name) for name in _NAMED), *names) if token}
    for text, i in (files("added_tokens.json") or {}).items():
        known = text in special
        added[i] = AddedToken(text, normalized=not known, special=known)
    for token in own:
        added[token["id"]] = _added({k: v for k, v in token.items() if k != "id"})
    return added


def _names_tokens(name: str) -> bool:
    return name.endswith("_token") or name in ("additional_special_tokens", "extra_special_tokens")


def _token(value: Any) -> Any:
    """A token that is spelt out becomes an AddedToken; lists and names of them, each of theirs."""
    if isinstance(value, list):
        return [_token(each) for each in value]
    if isinstance(value, dict):
        if "content" not in value:
            return {name: _token(each) for name, each in value.items()}
        return _added(value if "__type" in value else value | {"special": True})
    return value


def _added(value: dict[str, Any]) -> AddedToken:
    return AddedToken(**{name: each for name, each in value.items() if name != "__type"})


def _add(
    backend: tokenizers.Tokenizer,
    named: list[AddedToken | str],
    extra: list[AddedToken | str],
    added: list[AddedToken],
) -> None:
    """Give the tokenizer what the other files add to it; flags of tokens that it has are theirs, too."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    known |= {str(token) for token in added}
    tokens = list(added)
    for token in (*named, *extra):
        if str(token) not in known:
            known.add(str(token))
            tokens.append(AddedToken(token, special=True) if isinstance(token, str) else token)
    names = {str(token) for token in named}
    for token in tokens:
        token.special = token.special or token.content in names
    backend.add_tokens(tokens)


# --- chat templates -----------------------------------------------------------------------------


def _templates(path: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    files = {
        file.name.removesuffix(".jinja"): file
        for file in sorted((path / "additional_chat_templates").glob("*.jinja"))
    }
    if (path / "chat_template.jinja").is_file():
        files["default"] = path / "chat_template.jinja"
    if files:
        texts = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
        return texts["default"] if texts.keys() == {"default"} else texts
    given = config.get("chat_template")
    if isinstance(given, list):
        return {each["name"]: each["template"] for each in given}
    if given is not None and not isinstance(given, (str, dict)):
        raise TypeError("chat_template in tokenizer_config.json is no text")
    return given


# --- slow tokenizers ----------------------------------------------------------------------------


def _slow(path: Path) -> Pretrained:
    slow = [name for name in _SLOW if (path / name).is_file()]
    if not slow:
        raise ModelError(f"{path} has no tokenizer.json: copy the tokenizer files of the model into it")
    return _by_transformers(path, slow[0])


def _by_transformers(path: Path, file: str) -> Pretrained:
    try:
        from transformers import AutoTokenizer

        fast = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False, use_fast=True
        )
        return of_transformers(fast)
    except Exception as error:  # of `transformers`, `tokenizers`, `sentencepiece`
        raise ModelError(
            f"{path} has {file} but no tokenizer.json (a slow tokenizer), and transformers cannot "
            f"convert it: {error}. Install what it misses, or write tokenizer.json elsewhere with "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        ) from error
