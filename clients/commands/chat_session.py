"""The talk of `ramify chat`: turns and slash commands on a session's branches.

It reads lines from a function and writes to a `Screen`, so that tests can hold a conversation. It
remembers what was said, and when the server has lost the session it says that again in a new one. It
does not know terminals, flags or sockets.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ramify.clients.commands import branch_transcript
from ramify.clients.commands.arguments import as_typed, dropped, near, one, picture, words
from ramify.clients.commands.branch_transcript import Attached, BranchTranscript, Entry
from ramify.clients.commands.describe import describe, draw_tree, holding
from ramify.clients.commands.options import USUAL, set_option
from ramify.clients.commands.screen import Screen
from ramify.clients.errors import SessionLost
from ramify.clients.generation import Result
from ramify.clients.images import Image
from ramify.clients.options import GenerateOptions
from ramify.clients.sync import SyncBranch, SyncGeneration, SyncReply, SyncSession
from ramify.protocol.errors import BadRequest, Cancelled, RamifyError
from ramify.protocol.pictures import MARK, MOST_AT_ONCE
from ramify.protocol.wire import ChatMessage, Fork, Generate

ReadLine = Callable[[str], str | None]
Renew = Callable[[], SyncSession]
Import = Callable[[bytes], SyncSession]
WHOLE = ".session"  # files with this ending hold a whole session
MOST_BYTES = 1 << 26  # of such a file
QUOTES = '"""'
NAME_CHARS = 56  # of a branch that gives its name to others: 64 are allowed
RENEWALS = 3  # sessions that may be lost while one line is worked on

HELP = """\
/fork NAME       a new branch from here; /switch NAME goes there
/switch NAME     go on with another branch
/tree            the branches, and what the server keeps of them
/undo            take the last turn back
/retry           answer the last message again; the answer before stays on a branch of its own
/continue        go on with an answer that was cut
/image FILE      a picture that goes with the next message, for a model that sees; or drop files here
/set KEY VALUE   a generation option (temperature, max_tokens, ...); without VALUE: the default again
/set regex R     what answers must be; also choices, json_schema (JSON), grammar; without R: anything
/system TEXT     start this branch over with a system message
/save FILE       write this branch's messages (JSON); FILE.session: all branches, as a server has them
/load FILE       start this branch over with the messages of a file; FILE.session: go on with those
/quit            leave (Ctrl-D). Ctrl-C stops an answer
A message of several lines: paste it, put it between lines of \"\"\", or end lines with \\"""


class ChatSession:
    """A chat with one session. `options`: the generation options of every turn.

    `renew` makes a new session when the old one is lost; without it that is the end. `imports` makes one
    of a file that `Session.export` wrote. `older`: the session was there before this chat.
    """

    def __init__(
        self,
        session: SyncSession,
        read: ReadLine,
        screen: Screen,
        options: GenerateOptions,
        renew: Renew | None = None,
        imports: Import | None = None,
        *,
        older: bool = False,
    ) -> None:
        self.session = session
        self._older = older
        self.failed = False  # whether a line got an error
        self._read = read
        self._screen = screen
        self._options = options
        self._renew = renew
        self._imports = imports
        self._branch: SyncBranch = session.main
        self._said: dict[str, BranchTranscript] = {"main": BranchTranscript()}
        self._pictures: list[Attached] = []  # that go with the next message
        self._stale: set[str] = set()  # branches whose transcript the server knows better
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: screen.note(HELP),
            "fork": self._fork,
            "switch": self._switch,
            "tree": self._show_tree,
            "undo": self._undo,
            "retry": self._retry,
            "continue": self._continue,
            "image": self._attach,
            "set": self._set,
            "system": self.system,
            "save": self._save,
            "load": self._load,
        }

    @property
    def commands(self) -> list[str]:
        return [f"/{name}" for name in (*self._commands, "quit")]

    @property
    def branches(self) -> list[str]:
        return [branch.name for branch in self.session.branches]

    def learn(self) -> None:
        """Ask the server what was said in the session, which is an older one."""
        self._said = {name: BranchTranscript() for name in self.branches}
        self._stale = set(self._said)
        self._refresh()

    def leave(self) -> bool:
        """Close the session, as `connect` was told. One that this chat made and said nothing in is ended
        on the server too. Returns whether there is anything to go on with.
        """
        used = self._older or any(branch.position for branch in self.session.branches)
        self.session.close(keep=None if used else False)
        return used

    # --- lines ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Talk until the end of the input or /quit. Raises what ends the session."""
        while True:
            given = self._message()
            if given is None or given[0].strip() in ("/quit", "/exit"):
                return
            try:
                self._perform(*given)
            except KeyboardInterrupt:
                self._screen.note("stopped")
                self._stale.add(self._branch.name)
            except RamifyError as error:
                self.failed = True
                self._stale.add(self._branch.name)
                self._screen.error(error.message)
                if self.session.error is not None and not self._lost:
                    raise

    def _message(self) -> tuple[str, bool] | None:
        """Read one message, and whether it is certainly no command. None: the end."""
        name = self._branch.name
        prompt = "> " if name == "main" else f"{name}> "
        lines: list[str] = []
        quoted = False
        while True:
            try:
                line = self._read("... " if lines or quoted else prompt)
            except KeyboardInterrupt:
                self._screen.note("Ctrl-D leaves")
                lines, quoted = [], False
                continue
            if line is None:
                return ("\n".join(lines), quoted) if lines else None
            if not lines and not quoted and line.lstrip().startswith(QUOTES):
                line, quoted = line.lstrip()[len(QUOTES) :], True
                if not line.strip():
                    continue
            if quoted:
                if line.rstrip().endswith(QUOTES):
                    last = line.rstrip()[: -len(QUOTES)]
                    return "\n".join([*lines, last] if last else lines), True
                lines.append(line)
            elif line.endswith("\\") and "\n" not in line:
                lines.append(line[:-1])
            else:
                return "\n".join([*lines, line]), False

    def _perform(self, text: str, quoted: bool) -> None:
        """Handle a message, in a new session if the old one is lost. Raises RamifyError."""
        for _ in range(RENEWALS):
            try:
                if self._lost:
                    self._take_up()
                self._refresh()
                self.handle(text, quoted=quoted)
                return
            except RamifyError:
                if not self._lost:
                    raise
        raise SessionLost("the server lost the session again and again")

    def handle(self, text: str, *, quoted: bool = False) -> None:
        """Handle one message or command; `quoted`: certainly a message. Raises RamifyError."""
        if not text.strip():
            return
        if not quoted and (files := dropped(text)):
            self._attach(shlex.join(files))
            return
        name, _, rest = text.removeprefix("/").partition(" ")
        command = self._commands.get(name.strip())
        if quoted or not text.startswith("/") or (command is None and "\n" in text):
            self._say(text)
        elif command is None:
            raise BadRequest(f"/{name} is no command{near(name, self.commands)}: /help lists them")
        else:
            command(rest.strip())

    # --- turns ----------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        said, start, pictures = self._transcript, self._branch.position or 0, self._pictures
        if pictures:
            text = text.replace(MARK, "\ufffd")
            shown = [Image(each.data) for each in pictures]
            generation = self._branch.chat(text, images=shown, **self._options)
        else:
            generation = self._branch.chat(text, **self._options)
        try:
            result = self._show(generation)
        except KeyboardInterrupt:  # without a connection
            if generation.text:
                said.add("user", text, start, pictures)
                said.add("assistant", generation.text, start)
            raise
        except RamifyError as error:
            error.message = as_typed(error.message, [each.name for each in pictures])
            if not self._lost:  # else it is said again
                self._pictures = []
            raise
        self._pictures = []
        if result is not None:
            said.add("user", text, start, pictures)
            said.add("assistant", result.text, result.usage.prompt)

    def _show(self, generation: SyncGeneration) -> Result | None:
        """Stream an answer. Ctrl-C stops it and keeps what is there; None: before it was sent.

        Without a connection nothing would tell of the end, so Ctrl-C is raised.
        """
        if not self.session.connected:
            self._screen.note("the server is away; Ctrl-C returns to the prompt")
        try:
            with self._screen.answer() as answer:
                for delta in generation:
                    answer.add(delta.text, delta.cut)
        except KeyboardInterrupt:
            generation.cancel()
            if not self.session.connected:
                raise
        except RamifyError:
            self._screen.end_line()
            raise
        try:
            result = generation.result()
        except Cancelled:
            result = None  # before it was sent
        self._screen.end_line()
        if result is not None:
            self._screen.note(describe(result))
        return result

    @property
    def _transcript(self) -> BranchTranscript:
        return self._said.setdefault(self._branch.name, BranchTranscript())

    def _refresh(self) -> None:
        """Bring stale transcripts up to date, if there is a connection."""
        if not self.session.connected:
            return
        for name in sorted(self._stale):
            try:
                turns = self.session.branch(name).tree(text=True).turns or []
                said = branch_transcript.of_turns(turns)
                said.recall(self._said.get(name, BranchTranscript()))
                self._said[name] = said
            except RamifyError:
                if self._lost:
                    raise
                self._said.pop(name, None)  # dropped by another client, or too long to ask for
            self._stale.discard(name)

    # --- a session that is lost -----------------------------------------------------------------

    @property
    def _lost(self) -> bool:
        """Whether the server no longer has the session, and a new one can be made."""
        return self._renew is not None and isinstance(self.session.error, SessionLost)

    def _take_up(self) -> None:
        """Say everything again in a new session. Branches that shared a beginning share it again."""
        assert self._renew is not None
        session = self._renew()
        try:
            for name, said in self._said.items():
                if name != "main":
                    session.root(name)
                self._put(session, name, said.entries)
        except BaseException:  # the next line tries again
            session.close()
            raise
        self.session.close()
        self.session, self._branch = session, session.branch(self._branch.name)
        self._stale = set(self._said)
        self._screen.note("the conversation goes on in a new session")
        for name, said in self._said.items():
            if said.raw:
                self._screen.note(f"{name}: text that is no message is left out")

    def _put(self, session: SyncSession, branch: str, entries: Sequence[Entry]) -> None:
        ops = branch_transcript.appends(branch, entries)
        for reply in [reply for op in ops for reply in session.send([op])]:
            assert isinstance(reply, SyncReply)
            reply.result()

    # --- commands -----------------------------------------------------------------------------

    def _fork(self, rest: str) -> None:
        name = one(rest, "/fork NAME")
        self._branch.fork(name)
        self._said[name] = self._transcript.copy()
        self._screen.note(f"{name} starts at token {self._branch.position}: /switch {name}")

    def _switch(self, rest: str) -> None:
        name = one(rest, "/switch NAME")
        if name not in self.branches:
            raise BadRequest(f"there is no branch {name!r}; there are {', '.join(self.branches)}")
        self._branch = self.session.branch(name)

    def _show_tree(self, _: str) -> None:
        branches, kept = self.session.tree().branches, self.session.keeping
        self._screen.note(f"{draw_tree(branches, self._branch.name)}\n{holding(branches, *kept)}")

    def _undo(self, _: str) -> None:
        if self._branch.position == 0:
            raise BadRequest(f"nothing was said on {self._branch.name}: there is no turn to take back")
        position = self._branch.rollback(turns=1).position or 0
        self._transcript.cut(position)
        self._screen.note(f"back at token {position}")

    def _retry(self, _: str) -> None:
        """Roll back to where the last answer began, and generate, in one frame: the prompt is cached.
        The answer that was there is kept on a branch of its own.
        """
        name = self._branch.name
        ops = branch_transcript.before_answer(name, self._branch.tree(text=True).turns or [])
        old = None
        if ops:  # there is an answer: it stays, as a branch
            old = self._free_name(name)
            ops = [Fork(id=0, branch=name, as_=[old]), *ops]
        *_handles, generation = self.session.send([*ops, Generate(id=0, branch=name, **self._options)])
        assert isinstance(generation, SyncGeneration)
        self._stale |= {name, old} if old else {name}
        self._show(generation)
        if old in self.branches:
            self._screen.note(f"the answer before is on {old}: /switch {old}")

    def _free_name(self, name: str) -> str:
        """Find a free name: the first of `name-1`, `name-2`, ... that no branch has."""
        taken, number = set(self.branches), 1
        while f"{name[:NAME_CHARS]}-{number}" in taken:
            number += 1
        return f"{name[:NAME_CHARS]}-{number}"

    def _continue(self, _: str) -> None:
        """Go on with an answer that was cut: under its own constraint, whatever is set now."""
        if self._branch.tree().reason in (None, "stop", "tool"):
            raise BadRequest("no answer was cut here: /continue goes on where max_tokens or Ctrl-C cut")
        options = self._options.copy()
        options.pop("constraint", None)
        generation = self._branch.generate(**options)
        self._stale.add(self._branch.name)
        self._show(generation)

    def system(self, text: str) -> None:
        """Start the branch over with a system message."""
        if not text:
            raise BadRequest("say the system message as well: /system TEXT")
        self._start_over([ChatMessage(role="system", content=text)])

    def _start_over(self, messages: Sequence[ChatMessage]) -> None:
        if self._branch.position:
            self._branch.rollback(to=0)
        self._stale.add(self._branch.name)
        self._put(self.session, self._branch.name, [Entry(each, 0) for each in messages])
        self._refresh()

    def _attach(self, rest: str) -> None:
        """Attach a picture. Raises BadRequest, which names the file."""
        for name in words(rest, "/image FILE"):
            if len(self._pictures) >= MOST_AT_ONCE:
                raise BadRequest(f"{name}: a message can have {MOST_AT_ONCE} pictures")
            file, data = picture(name)
            self._pictures.append(Attached(file, data))
            self._screen.note(f"[picture: {file}] goes with the next message ({len(data):,} bytes)")

    def _set(self, rest: str) -> None:
        if not rest:
            plain = msgspec.to_builtins(self._options)  # a constraint is a struct
            note = json.dumps(plain) if plain else f"all defaults; /set NAME VALUE changes one: {USUAL}"
            self._screen.note(note)
            return
        name, _, value = rest.partition(" ")
        set_option(self._options, name, value.strip())

    def _save(self, rest: str) -> None:
        path = Path(one(rest, "/save FILE")).expanduser()
        if path.suffix == WHOLE:
            self._save_whole(path)
            return
        said = branch_transcript.of_turns(self._branch.tree(text=True).turns or [])
        said.recall(self._transcript)
        if said.raw:
            raise BadRequest("this branch holds text that is no message: it cannot be saved as messages")
        branch_transcript.write(path, self.session.model, self._branch.name, said.messages)
        self._screen.note(f"{len(said.messages)} messages in {path}")

    def _load(self, rest: str) -> None:
        path = Path(one(rest, "/load FILE")).expanduser()
        if path.suffix == WHOLE:
            self._load_whole(path)
            return
        messages = branch_transcript.read(path)
        self._start_over(messages)
        asks = "; /retry answers the last one" if messages[-1].role in ("user", "tool") else ""
        self._screen.note(f"{len(messages)} messages from {path}{asks}")

    def _save_whole(self, path: Path) -> None:
        data = self.session.export()
        try:
            path.write_bytes(data)
        except OSError as error:
            raise BadRequest(f"{path}: {error.strerror}") from None
        self._screen.note(f"the session is in {path}; branches: {len(self.branches)}")

    def _load_whole(self, path: Path) -> None:
        """Go on in a new session made of the file; the one before ends as with /quit."""
        if self._imports is None:
            raise BadRequest("a whole session cannot be loaded here")
        try:
            if path.stat().st_size > MOST_BYTES:
                raise BadRequest(f"{path} has more than {MOST_BYTES} bytes")
            data = path.read_bytes()
        except OSError as error:
            raise BadRequest(f"{path}: {error.strerror}") from None
        session = self._imports(data)
        self.leave()
        self.session, self._older = session, False
        names = self.branches
        name = "main" if "main" in names or not names else names[0]
        self._branch = session.branch(name)
        self.learn()
        self._screen.note(f"branches of {path}: {', '.join(names)}; you are on {name}")
