from ramify.actors.gateway.port.access.unfinished import Unfinished


def test_the_client_that_has_most_loses_what_it_began_first() -> None:
    lost: list[int] = []
    unfinished = Unfinished(100)
    for number, client, size in ((1, "few", 20), (2, "many", 30), (3, "many", 10)):
        unfinished.note(client, number, size, lambda number=number: lost.append(number))
    unfinished.note("many", 3, 50, lambda: lost.append(3))
    assert not lost, "a hundred is not more than a hundred"
    unfinished.note("few", 1, 21, lambda: lost.append(1))
    assert lost == [2]
    unfinished.note("few", 4, 45, lambda: lost.append(4))
    assert lost == [2, 1], "few has most now"


def test_what_is_whole_counts_no_more() -> None:
    lost: list[int] = []
    unfinished = Unfinished(100)
    for number in range(10):
        unfinished.note("a", number, 90, lambda: lost.append(0))
        assert number in unfinished.parts
        unfinished.leave(number)
        unfinished.leave(number)
        assert number not in unfinished.parts
    assert not lost


def test_the_name_that_a_socket_began_with_is_the_one_that_pays() -> None:
    unfinished = Unfinished(100)
    unfinished.note("10.0.0.1", 1, 60, lambda: None)
    unfinished.note("name", 1, 70, lambda: None)
    unfinished.leave(1)
    unfinished.note("name", 2, 100, lambda: None)
    assert 2 in unfinished.parts
