"""What a process works on is seen by another one that has the same file."""

import os

from ramify.actors.kit.working import Working, cell_of, working_file


def test_another_process_sees_what_one_works_on() -> None:
    file = working_file(2)
    try:
        first, second, engine = Working(file, 0), Working(file, 1), Working(file, 1)
        assert engine.session is None
        second.on(cell_of("s_1_a-long-name"))
        first.on(cell_of("s_0"))
        assert engine.session == "s_1_a-long-name"
        second.on(cell_of("s_1_b"))
        assert engine.session == "s_1_b"
        second.off()
        assert engine.session is None
        assert first.session == "s_0"
    finally:
        os.close(file)
