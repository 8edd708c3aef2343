"""The stamp of a checkpoint's KV: executors with equal stamps can read each other's blocks of KV.

It covers the format of blocks, the number formats, the checkpoint's settings, and the names, sizes and
samples of its files of weights: an update of weights changes nearly all samples.
"""

from hashlib import blake2b
from pathlib import Path

from ramify.protocol.config import ModelConfig
from ramify.protocol.plan import ExecutorInfo

FORMAT = 1  # of blocks: raise it when their bytes change their meaning
_SAMPLES, _BYTES = 64, 1024  # of a file of weights


def kv_stamp(config: ModelConfig, info: ExecutorInfo) -> str:
    """Compute the stamp of an executor's blocks. Raises OSError."""
    digest = blake2b(digest_size=16)
    numbers = info.dtype, info.kv_dtype, info.quantization, info.kv_bytes_per_token, info.architecture
    settings = config.deterministic, config.load_format, config.context, info.drafter
    ranks = (config.tensor_parallel,) if config.tensor_parallel > 1 else ()  # each has its part
    digest.update(repr((FORMAT, numbers, settings, *ranks)).encode())
    folder = config.path
    patterns = ("*.json", "*.safetensors", "*.bin", "*.gguf")
    files = [folder] if folder.is_file() else [path for each in patterns for path in folder.glob(each)]
    for path in sorted(files):
        _sample(path, digest)
    return digest.hexdigest()


def _sample(path: Path, digest: "blake2b") -> None:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        digest.update(f"{path.name} {size}".encode())
        step = max(_BYTES, size // _SAMPLES)
        for at in range(0, size, step):
            file.seek(at)
            digest.update(file.read(_BYTES))
