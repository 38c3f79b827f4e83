"""One end of a program waits for many connections at once."""

import socket

from ppdist.launch.connection import Connection, Poller, send_to_all


def test_only_sources_with_news_are_handled_and_closed_ones_leave() -> None:
    poller, handled = Poller(), []
    pairs = [socket.socketpair() for _ in range(3)]
    for index, (near, _) in enumerate(pairs):
        poller.add(near, lambda index=index: handled.append(index))
    pairs[1][1].send(b"x")
    poller.run(1.0)
    assert handled == [1]
    # Its function changes, and the first source takes the second one along.
    poller.add(pairs[0][0], pairs[1][0].close)
    pairs[0][1].send(b"x")
    poller.run(1.0)
    handled.clear()
    poller.remove(pairs[0][0])
    poller.run(0.0)
    assert handled == []
    # The number of a closed source is in use again.
    near, far = socket.socketpair()
    poller.add(near, lambda: handled.append(near.fileno()))
    far.send(b"x")
    poller.run(1.0)
    assert handled == [near.fileno()]
    for end in (near, far, *(end for pair in pairs for end in pair)):
        end.close()
    poller.close()


def test_a_message_to_all_waits_for_the_token_of_each() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
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
