"""docs/settings.md, made from the settings' declarations.

.venv/bin/python -m ramify.clients.commands.settings_page > docs/settings.md
"""

from ramify.clients.commands.flags import GROUPS, default_of, members_of
from ramify.clients.commands.settings import SERVER
from ramify.protocol.settings import DeclaredSetting, declared

HEAD = """# Settings of a server

All flags of `ramify serve`, with their defaults and bounds; how they are used is in
[operating.md](operating.md). A value out of bounds is refused before anything starts, by the flag's
name. Bold flags are those that `--help` shows; `--help-all` shows all of them. This page is made from
their declarations (`.venv/bin/python -m ramify.clients.commands.settings_page > docs/settings.md`).
"""

# Variables of the server beside the settings' own: no flag says the same.
VARIABLES = {
    "RAMIFY_KERNEL_CACHE": "folder of the CPU kernels' compiled code, and of tiles that were measured "
    "for a GPU (default: ramify/kernels in "
    "$XDG_CACHE_HOME or ~/.cache); empty: none is kept",
}


def page() -> str:
    """Write the whole page."""
    parts = [HEAD]
    for group, text in GROUPS.items():
        parts.append(f"\n## {group.capitalize()}\n")
        if text:
            parts.append(f"{text[0].upper()}{text[1:]}.\n")
        parts.append("\n| flag | default | may be | what it is |\n|---|---|---|---|\n")
        parts += [_row(each) for each in members_of(group, SERVER)]
    named = [each for kind in SERVER for each in declared(kind) if each.setting.environment]
    parts.append("\n## Variables\n\n| variable | instead of | what it is |\n|---|---|---|\n")
    parts += [
        f"| `{each.setting.environment}` | {_code(each.flag or '')} | {_cell(each.setting.help)} |\n"
        for each in named
    ]
    parts += [f"| `{name}` |  | {_cell(meaning)} |\n" for name, meaning in VARIABLES.items()]
    return "".join(parts)


def _row(each: DeclaredSetting) -> str:
    flag = f"`{each.flag}`"
    if each.setting.first:
        flag = f"**{flag}**"
    words = [*each.choices, *each.setting.words]
    free = "a list" if each.many else "or text" if words and each.kind is str else ""
    allowed = [", ".join(f"`{word}`" for word in words), each.bounds, free]
    unit = f"{each.setting.unit} " if each.setting.unit == "seconds" else ""
    cells = [flag, default_of(each), ", ".join(filter(None, allowed)), unit + each.setting.help]
    return f"| {' | '.join(map(_cell, cells))} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    print(page(), end="")
