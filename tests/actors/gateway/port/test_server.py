"""Binding a port for several processes."""

import socket

import pytest

from ramify.actors.gateway.port.server import ACCEPTS, Listener, bind_shared
from ramify.protocol.config import ServerConfig
from ramify.protocol.errors import ConfigError


def close(bound: list[list[socket.socket]]) -> None:
    for sockets in bound:
        for sock in sockets:
            sock.close()


@pytest.mark.parametrize("processes", [1, 3])
def test_each_process_gets_a_listening_socket_at_one_port(processes: int) -> None:
    bound = bind_shared(ServerConfig(port=0), processes)
    try:
        assert len(bound) == processes
        (port,) = {sock.getsockname()[1] for sockets in bound for sock in sockets}
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(30)]
        taken = 0
        for sockets in bound:
            for sock in sockets:
                while True:
                    try:
                        sock.accept()[0].close()
                    except BlockingIOError:
                        break
                    taken += 1
        assert taken == 30
        for client in clients:
            client.close()
    finally:
        close(bound)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_port_that_others_share_is_taken(processes: int) -> None:
    bound = bind_shared(ServerConfig(port=0), 2)
    port = bound[0][0].getsockname()[1]
    try:
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind_shared(ServerConfig(port=port), processes)
    finally:
        close(bound)
    close(bind_shared(ServerConfig(port=port), processes))


def test_an_address_that_this_machine_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `localhost` may name ::1 where there is no IPv6. Without any address there is no server."""
    here, lacking = ("127.0.0.1", 0), ("192.0.2.1", 0)  # the second one is for documentation
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in (lacking, here)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    bound = bind_shared(ServerConfig(host="localhost", port=0), 2)
    close(bound)
    assert [len(sockets) for sockets in bound] == [1, 1]
    del found[1]
    with pytest.raises(ConfigError, match="cannot listen"):
        bind_shared(ServerConfig(host="localhost", port=0), 1)


def test_all_interfaces_have_one_port() -> None:
    bound = bind_shared(ServerConfig(host="", port=0, insecure=True), 2)
    try:
        assert len({sock.getsockname()[1] for sockets in bound for sock in sockets}) == 1
    finally:
        close(bound)


def test_connections_are_taken_in_parts_and_refused_before_anything_is_made() -> None:
    admitted = iter([True, False] * ACCEPTS)
    (made,) = bind_shared(ServerConfig(port=0), 1)[0]
    with Listener(made.detach(), lambda _: next(admitted)) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(ACCEPTS + 8)]
        taken: list[socket.socket] = []
        for turn in (ACCEPTS // 2, ACCEPTS // 2 + 4):
            with pytest.raises(BlockingIOError):
                while True:
                    taken.append(listener.accept()[0])
            assert len(taken) == turn
        close([taken])
        assert [client.recv(1) for client in clients] == [b""] * len(clients)
        close([clients])
