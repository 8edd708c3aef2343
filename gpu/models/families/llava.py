"""LLaVA 1.5: a decoder of Llama or Mistral, and CLIP's tower beside it."""

from ramify.gpu.models.families import llama, mistral
from ramify.gpu.models.parts import Family
from ramify.gpu.models.towers import clip_vision

_WHOLE = ("LlavaForConditionalGeneration", "llava")
_MISTRAL = Family(*_WHOLE, mistral.DEFAULTS, mistral.define, text="mistral", vision=clip_vision)
FAMILIES = (
    Family(*_WHOLE, llama.DEFAULTS, llama.define, text="llama", other=_MISTRAL, vision=clip_vision),
)
