"""One end of a program waits for many connections at once."""

import fcntl
import socket

from ppdist.launch.connection import Connection, Poller, send_to_all
from tests.unit.launch.sockets import socket_pair


def test_only_connections_with_news_are_handled_and_closed_ones_leave() -> None:
    poller, second, handled = Poller(), Poller(), []
    pairs = [socket_pair() for _ in range(3)]
    connections = [Connection(near) for near, _ in pairs]
    for index, connection in enumerate(connections):
        poller.add(connection, lambda index=index: handled.append(index))
    pairs[1][1].send(b"x")
    poller.run(1.0)
    assert handled == [1]
    connections[1].receive()
    # The number of a closed connection is in use again.
    number, numbers = connections[2].fileno(), []
    near, far = socket_pair()
    connections[2].close()
    pairs[2][1].close()
    pairs[2] = socket.socket(fileno=fcntl.fcntl(near, fcntl.F_DUPFD, number)), far
    near.close()
    connections[2] = Connection(pairs[2][0])
    assert connections[2].fileno() == number
    poller.add(connections[2], lambda: numbers.append(connections[2].fileno()))
    pairs[2][1].send(b"x")
    poller.run(1.0)
    assert numbers == [number]
    connections[2].receive()
    # Each of two that have news closes the other one.
    handled.clear()
    for index, opposite in ((0, 1), (1, 0)):
        near, far = connections[opposite], pairs[index][1]
        poller.add(connections[index], lambda near=near: (handled.append(9), near.close()))
        far.send(b"x")
    poller.run(1.0)
    assert handled == [9]
    connections[0].close()
    connections[1].close()
    # A connection belongs to one poller at a time.
    pairs[2][1].send(b"x")
    second.add(connections[2], lambda: handled.append(2))
    poller.run(0.0)
    second.run(1.0)
    assert handled == [9, 2] and numbers == [number]
    for connection, (_, far) in zip(connections, pairs):
        connection.close()
        far.close()
    second.add(connections[0], lambda: handled.append(0))  # closed: nothing arrives any more
    second.run(0.0)
    assert handled == [9, 2]
    poller.close()
    second.close()


def test_a_message_to_all_waits_for_the_token_of_each() -> None:
    pairs = [socket_pair() for _ in range(2)]
    callers = [Connection(near, calls=True) for near, _ in pairs]
    called = [Connection(far) for _, far in pairs]
    send_to_all(called, {"type": "begin", "hosts": ["a", "b"]})
    received: list[list[dict]] = [[], []]
    poller = Poller()
    for index, caller in enumerate(callers):
        poller.add(caller, lambda index=index: received[index].extend(callers[index].receive()))
        poller.add(called[index], called[index].receive)
    while not all(received):
        poller.run(1.0)
    assert received == [[{"type": "begin", "hosts": ["a", "b"]}]] * 2
    for connection in (*callers, *called):
        connection.close()
    poller.close()
