"""Connected sockets that are closed when their test ends."""

import socket

_opened: list[socket.socket] = []


def socket_pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    _opened.extend(pair)
    return pair


def close_sockets() -> None:
    while _opened:
        _opened.pop().close()
