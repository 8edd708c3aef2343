"""Messages between a front and its Ray driver (`ray_replicas.py`, `ray_driver.py`), as msgpack.

This file does not know sockets or processes.
"""

import msgspec

from ramify.actors.kit.log import LogConfig
from ramify.actors.kit.paths import decode_path, encode_path
from ramify.protocol.config import ReplicasConfig


class _Base(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Positional on the wire, tagged with the class name."""


# --- from the front -------------------------------------------------------------------------------


class Drive(_Base, frozen=True):
    """Have so many actors. `host`, `port`, `secret`, `pem`: where they join. `device`: the model's.

    `proven`: a replica has been ready, so actors that fail are tried for ever.
    """

    settings: ReplicasConfig
    host: str
    port: int
    secret: bytes
    pem: str | None
    device: str
    count: int
    proven: bool
    log: LogConfig | None


class Scale(_Base, frozen=True):
    """Have so many from now on."""

    count: int


class Proven(_Base, frozen=True):
    """A replica has been ready."""


class End(_Base, frozen=True):
    """Nothing more is wanted: end the actors, then the process."""


FromFront = Drive | Scale | Proven | End

# --- to the front ---------------------------------------------------------------------------------


class Started(_Base, frozen=True):
    """Ray is there, and has been asked for the actors."""


class Failed(_Base, frozen=True):
    """It cannot be. `mendable`: by who started the front (ConfigError); else there are no replicas."""

    message: str
    mendable: bool


FromDriver = Started | Failed

# --- codecs ---------------------------------------------------------------------------------------


def encoder() -> msgspec.msgpack.Encoder:
    """For both directions."""
    return msgspec.msgpack.Encoder(enc_hook=encode_path)


def from_front() -> "msgspec.msgpack.Decoder[FromFront]":
    """What a driver decodes."""
    return msgspec.msgpack.Decoder(FromFront, dec_hook=decode_path)


def from_driver() -> "msgspec.msgpack.Decoder[FromDriver]":
    """What a front decodes."""
    return msgspec.msgpack.Decoder(FromDriver)
