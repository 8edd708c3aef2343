"""The main program of a process that decodes clients' pictures. See `processes.main`.

A picture is hostile until it is pixels: Pillow reads it here, with bounds on memory and on the
processor's time; the engine ends the process where that does not. Sizes are checked before pixels are
made.
"""

import contextlib
import io
import math
import os
import resource
import socket
import time
import warnings
from contextlib import closing

from PIL import Image, ImageOps

from ramify.actors.links.blocking import BlockingLink
from ramify.actors.processes.main import GONE, run
from ramify.actors.processes.messages import decoder, encoder
from ramify.protocol.pictures import (
    FromDecoder,
    Picture,
    PictureDone,
    PictureJob,
    PictureReady,
    PictureRefused,
    PictureSettings,
    box,
    fitted,
    placeholders,
)

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MEMORY = 768 << 20  # bytes beyond what the start took; the largest that is admitted takes 660 MiB
_STRIP = 1 << 20  # pixels
BICUBIC, BILINEAR = Image.Resampling.BICUBIC, Image.Resampling.BILINEAR


def serve(sock: socket.socket) -> int:
    """Work until the engine has gone. Returns the exit code."""
    os.nice(5)  # steps of the model go first
    warnings.simplefilter("ignore")
    Image.init()
    Image.MAX_IMAGE_PIXELS = None  # `fitted` has a bound of its own
    with contextlib.suppress(OSError, ValueError):  # not Linux: time alone is bounded
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    engine: BlockingLink[FromDecoder, PictureJob] = BlockingLink(sock, decoder(PictureJob), encoder())
    with closing(engine):
        engine.send(PictureReady())
        while (job := engine.receive(None)) is not None:
            _bound_seconds(job.seconds)
            engine.send(decoded(job.data, job.settings))
    return GONE


def _bound_seconds(more: int) -> None:
    """The system ends the process where it takes more of a processor, however busy the machine is."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + more, most))


def decoded(data: bytes, settings: PictureSettings) -> PictureDone | PictureRefused:
    """The first frame, upright, on white, in RGB, fitted."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as source:
            fitted(*source.size, settings)  # before anything is decoded
            upright = _on_white(ImageOps.exif_transpose(source))
        width, height = fitted(*upright.size, settings)
        resized = upright.resize((width, height), BILINEAR if settings.fit == "stretch" else BICUBIC)
        picture = Picture(*(kept := resized.crop(box(width, height, settings))).size, kept.tobytes())
        return PictureDone(picture, placeholders(picture, settings).tobytes())
    except MemoryError:
        return PictureRefused("takes too much memory to decode")
    except ValueError as error:
        return PictureRefused(f"{error}"[:200])
    except Exception as error:  # decoders of damaged files raise anything
        return PictureRefused(f"is damaged, or no PNG, JPEG, WebP or GIF ({type(error).__name__})")


def _on_white(source: Image.Image) -> Image.Image:
    """In RGB. What is transparent is seen on white, as processors of `transformers` see it.

    16 bits of grey become the upper 8; Pillow, and so `transformers`, would make white of all over 255.
    """
    if source.mode.startswith("I"):
        return source.point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if "A" not in source.getbands() and source.info.get("transparency") is None:
        return source.convert("RGB")
    (width, height), found = source.size, Image.new("RGB", source.size)
    rows = max(1, _STRIP // width)
    for top in range(0, height, rows):  # a whole one would take three times its memory
        strip = source.crop((0, top, width, min(top + rows, height))).convert("RGBA")
        white = Image.new("RGBA", strip.size, "white")
        found.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return found


if __name__ == "__main__":
    run(serve)
