"""The model families: each is a file in this folder, found by being here.

A file's `FAMILIES` has the architectures that it serves, with the defaults of their config classes, and
the functions that turn a config's fields into layers.
"""

from importlib import import_module
from pkgutil import iter_modules

from ramify.gpu.models.parts import Family

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for module in sorted(each.name for each in iter_modules(__path__))
    for family in import_module(f"{__name__}.{module}").FAMILIES
}
